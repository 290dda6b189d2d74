"""Dataclasses from JSON values, each value of the type that its field declares."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

Made = TypeVar("Made")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def made(kind: type[Made], record: Any) -> Made:
    """The dataclass that a JSON object describes: integers have 64 bits, floats are finite, and lists stand for
    tuples.

    Raises:
        ValueError: ``record`` is no object, a field is unknown or of another type, or the dataclass refuses a value.
        TypeError: a field is missing.
    """
    if not isinstance(record, dict):
        raise ValueError(f"an object is expected, not {type(record).__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]  # classes are hashable
    if unknown := [name for name in record if name not in hints]:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}; a later prefixkit may have written it")
    return kind(**{name: typed(value, hints[name], name) for name, value in record.items()})


def typed(value: Any, hint: Any, name: str) -> Any:
    """A JSON value as ``hint`` declares it.

    Raises:
        ValueError: the value is of another type; the message has ``name``, the field's.
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        for one in inner:
            try:
                return typed(value, one, name)
            except ValueError:
                continue
    elif kind is Any:
        return value
    elif is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else made(kind, value)
    elif kind in (tuple, list) and isinstance(value, list | tuple):
        hints = inner[:1] * len(value) if kind is list or inner[1:] == (...,) else inner
        if len(hints) == len(value):
            return kind(typed(one, hint, name) for one, hint in zip(value, hints, strict=True))
    elif kind is Mapping and isinstance(value, dict):
        return {typed(key, inner[0], name): typed(one, inner[1], name) for key, one in value.items()}
    elif is_typeddict(kind) and isinstance(value, dict) and value.keys() == _hints(kind).keys():
        return {key: typed(one, _hints(kind)[key], name) for key, one in value.items()}
    elif value in inner if kind is Literal else _is(value, kind):
        return value
    got = repr(value[:40]) if isinstance(value, str) else type(value).__name__
    raise ValueError(f"{name!r} must be {hint.__name__ if isinstance(hint, type) else hint}, not {got}")


def _is(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    if kind is int:
        return type(value) is int and -(2**63) <= value < 2**64
    return type(value) is kind and kind in (str, bool, NoneType)
