"""The content of Python functions: their code, everything that they capture, and a digest of both."""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def fingerprint(*values: object) -> str:
    """A 64-bit digest, in hexadecimal, of functions, tensors, numbers, strings and sequences of them.

    Equal content gives equal digests in every process.  Tensors are digested by dtype, shape and elements; functions by
    code, defaults, closure and the module-level names that they read; torch's functions by name.

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
    return function.__defaults__, function.__kwdefaults__, tuple(cells), read


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The module-level names that a function and its inner functions read."""
    found = [str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found += _global_names(inner)
    return tuple(dict.fromkeys(found))


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
    elif isinstance(value, types.BuiltinFunctionType | type | types.ModuleType):
        raw("named", f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}".encode())
    else:
        raise TypeError(
            f"a function may capture numbers, strings, tensors and plain functions, got a {type(value).__name__}; "
            "capture the numbers that it holds instead"
        )
