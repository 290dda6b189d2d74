"""The content of Python functions: their code, everything that they capture, and a digest of both."""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def fingerprint(*values: object) -> str:
    """A 64-bit digest, in hexadecimal, of functions, tensors, numbers, strings and sequences of them.

    Equal content gives equal digests in every process.  Tensors are digested by dtype, shape and elements; functions by
    code, defaults, closure and the module-level names that they read; torch's functions by name.  Of classes and
    modules, installed ones apart, the attributes that the function's code names are followed.

    Raises:
        TypeError: a value is of another kind.
    """
    content = hashlib.sha256()
    for value in values:
        _feed(content, value)
    return content.hexdigest()[:16]


def captured(*functions: object) -> list[object]:
    """What functions consist of now, in a fixed order: their code, and the tensors, numbers and other values that they
    read besides their arguments, from closures, defaults, partials and module-level names, also through other
    functions.

    Two functions whose lists have identical tensors and equal values do the same, also after such a tensor changes in
    place.
    """
    return [*_parts(functions, set())]


def _parts(value: object, seen: set[int]) -> Iterator[object]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _parts(item, seen)
    elif isinstance(value, dict):
        yield from _parts(tuple(value.items()), seen)
    elif isinstance(value, functools.partial):
        yield from _parts((value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.MethodType) and isinstance(value.__self__, type):
        yield from _parts(_of_class_method(value), seen)
    elif isinstance(value, types.FunctionType) and not _is_of_torch(value):
        if id(value) not in seen:
            seen.add(id(value))
            yield value.__code__
            yield from _parts(_read_by(value), seen)
    else:
        yield value


def _read_by(function: types.FunctionType) -> tuple[object, ...]:
    """The values that a function reads besides its arguments, except for names that have no value yet."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # a name that is bound later
            cells.append(None)
    names = [name for name in _global_names(function.__code__) if name in function.__globals__]
    read = tuple((name, function.__globals__[name]) for name in names)
    values = function.__defaults__, function.__kwdefaults__, tuple(cells), read
    holders = (*cells, *(value for _, value in read), *(function.__defaults__ or ()))
    return *values, _attributes(holders, _named_attributes(function.__code__))


def _of_class_method(method: types.MethodType) -> tuple[object, ...]:
    """A class method's function and class, and the attributes of that class that it names."""
    code = getattr(method.__func__, "__code__", None)
    names = _named_attributes(code) if code is not None else frozenset[str]()
    return method.__func__, method.__self__, _attributes((method.__self__,), names)


def _attributes(values: Iterable[object], names: frozenset[str]) -> tuple[tuple[str, object], ...]:
    """The attributes of these names of classes and modules among the values, also of those that are attributes."""
    found, seen, left = list[tuple[str, object]](), set[int](), [*values]
    while left:
        holder = left.pop()
        if id(holder) in seen or not isinstance(holder, type | types.ModuleType) or _is_installed(holder):
            continue
        seen.add(id(holder))
        for name in sorted(names):
            if hasattr(holder, name):
                value = getattr(holder, name)
                found.append((f"{holder.__name__}.{name}", value))
                left.append(value)
    return tuple(found)


def _is_installed(holder: type | types.ModuleType) -> bool:
    """Whether a class or module belongs to Python, to an installed package or to this one."""
    module = holder if isinstance(holder, types.ModuleType) else sys.modules.get(holder.__module__)
    if isinstance(holder, type) and module is None:
        return False
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if name == "__main__":
        return False
    if file is None:  # built into Python, unless a program made it
        return name in sys.builtin_module_names
    return name.partition(".")[0] in ("torch", "prefixkit") or _is_library(file)


@functools.cache
def _is_library(file: str) -> bool:
    path, python = Path(file), {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return bool({"site-packages", "dist-packages"} & {*path.parts}) or any(map(path.is_relative_to, python))


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The module-level names that a function and its inner functions read."""
    found = [str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found += _global_names(inner)
    return tuple(dict.fromkeys(found))


@functools.cache
def _named_attributes(code: types.CodeType) -> frozenset[str]:
    """The names that a function and its inner functions read attributes by."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*map(_named_attributes, inner))


def _is_of_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


def _feed(content: Any, value: object, seen: frozenset[int] = frozenset()) -> None:
    def raw(kind: str, data: bytes) -> None:
        # Kind and length come first, so that different sequences of values feed different bytes.
        content.update(f"{kind}:{len(data)}:".encode())
        content.update(data)

    def sequence(items: Any) -> None:
        raw("sequence", str(len(items)).encode())
        for item in items:
            _feed(content, item, seen)

    if value is None or value is Ellipsis or isinstance(value, bool | int | float | complex | str | bytes):
        raw(type(value).__name__, repr(value).encode())
    elif isinstance(value, Tensor):
        raw("tensor", f"{value.dtype}{tuple(value.shape)}".encode())
        raw("data", value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, torch.dtype):
        raw("dtype", str(value).encode())
    elif isinstance(value, tuple | list):
        sequence(value)
    elif isinstance(value, frozenset):
        sequence(sorted(value, key=repr))
    elif isinstance(value, dict):
        sequence(tuple(value.items()))
    elif isinstance(value, functools.partial):
        sequence((value.func, value.args, value.keywords))
    elif isinstance(value, types.CodeType):
        raw("code", value.co_code)
        sequence((value.co_consts, value.co_names, value.co_varnames))
    elif isinstance(value, types.FunctionType):
        raw("function", f"{value.__module__}.{value.__qualname__}".encode())
        if not _is_of_torch(value) and id(value) not in seen:  # a recursive function is visited once
            seen |= {id(value)}
            sequence((value.__code__, *_read_by(value)))
    elif isinstance(value, enum.Enum):
        raw("member", f"{type(value).__module__}.{type(value).__qualname__}.{value.name}".encode())
    elif isinstance(value, types.MethodType) and isinstance(value.__self__, type):
        sequence(_of_class_method(value))
    elif isinstance(value, types.BuiltinFunctionType | type | types.ModuleType):
        raw("named", f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}".encode())
    else:
        raise TypeError(
            f"a function may capture numbers, strings, tensors and plain functions, got a {type(value).__name__}; "
            "capture the numbers that it holds instead"
        )
