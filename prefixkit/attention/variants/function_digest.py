"""A digest of what Python functions do: their code and everything they capture."""

from __future__ import annotations

import functools
import hashlib
import types
from typing import Any

import torch
from torch import Tensor


def fingerprint(*values: object) -> str:
    """64 bits, in hexadecimal, of the content of functions, tensors, numbers, strings and sequences of them.

    Equal content gives equal digests in every process; tensors count by dtype, shape and numbers, functions by code,
    defaults and closure.  Module-level names that a function uses count by name only.

    Raises:
        TypeError: a value has no content to go by.
    """
    content = hashlib.sha256()
    for value in values:
        _feed(content, value)
    return content.hexdigest()[:16]


def _feed(content: Any, value: object) -> None:
    def raw(kind: str, data: bytes) -> None:
        # Kind and length go first, so that no two sequences of values read the same.
        content.update(f"{kind}:{len(data)}:".encode())
        content.update(data)

    def sequence(items: Any) -> None:
        raw("sequence", str(len(items)).encode())
        for item in items:
            _feed(content, item)

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
        captured = tuple(cell.cell_contents for cell in value.__closure__ or ())
        sequence((value.__code__, value.__defaults__, value.__kwdefaults__, captured))
    elif isinstance(value, types.BuiltinFunctionType | type | types.ModuleType):
        raw("named", f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}".encode())
    else:
        raise TypeError(
            f"a function may capture numbers, strings, tensors and plain functions, got a {type(value).__name__}; "
            "capture the numbers that it holds instead"
        )
