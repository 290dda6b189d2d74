"""What cannot be traced, and the error that says so."""

from __future__ import annotations

import functools
import linecache
import types
from typing import NoReturn

Line = tuple[str, int]  # file, line number


class UntraceableVariant(ValueError):
    """A function uses an operation that expressions lack, or control flow that depends on a value."""


def refuse(function: object, reason: str, line: Line | None) -> NoReturn:
    """Raise UntraceableVariant for a function, for a reason that follows its name, at a line of the caller's code."""
    name = getattr(function, "__name__", type(function).__name__)
    at = "" if line is None else f" at {line[0]}:{line[1]}: {linecache.getline(*line).strip()}"
    raise UntraceableVariant(
        f"{name}: {reason}{at}. Write it with arithmetic, comparisons, torch.where and indices of captured tensors; or "
        f"{_untraced(function)}, which runs the variant in plain torch"
    )


def _untraced(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.FunctionType | types.BuiltinFunctionType):
        return "pass traced=False"
    return (
        f"write a plain function that captures what the {type(function).__name__} holds, and pass it with traced=False"
    )
