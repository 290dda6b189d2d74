"""Compares a function's result with the expected result."""

from __future__ import annotations

import math
from typing import Any

from prefixkit.evaluation.judge.wire import Opaque, Unhashed

_MOST_HASHED = 1000


def equal(found: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether two values are equal.

    As Python's ``==``, with these differences: a tuple equals a list with the same items, since JSON has only lists;
    nan equals nan; and two numbers may differ within ``tolerance`` if one is a float.

    Args:
        found: As read by :func:`prefixkit.evaluation.judge.wire.read` without hash tables.
        expected: The trusted value, of JSON types, or sets.
        tolerance: Absolute, and relative to the larger of two floats.
    """
    if isinstance(expected, (list, tuple)):
        same = isinstance(found, (list, tuple)) and len(found) == len(expected)
        return same and all(equal(a, b, tolerance) for a, b in zip(found, expected, strict=True))
    if isinstance(expected, dict):
        return isinstance(found, Unhashed) and found.kind is dict and _equal_dicts(found.items, expected, tolerance)
    if isinstance(expected, (set, frozenset)):
        if not isinstance(found, Unhashed) or found.kind is dict:
            return False
        return _equal_dicts([(item, None) for item in found.items], dict.fromkeys(expected), 0.0)
    if isinstance(found, (Unhashed, Opaque)):
        return False
    if isinstance(expected, (int, float)) and isinstance(found, (int, float)):
        return _equal_numbers(found, expected, tolerance)
    return bool(found == expected)


def _equal_numbers(found: float, expected: float, tolerance: float) -> bool:
    if found == expected or (found != found and expected != expected):
        return True
    if not tolerance or not (isinstance(found, float) or isinstance(expected, float)):
        return False
    try:
        a, b = float(found), float(expected)
    except OverflowError:  # an int larger than all floats
        return False
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def _equal_dicts(items: list[tuple[Any, Any]], expected: dict[Any, Any], tolerance: float) -> bool:
    """Look up the found keys among the expected ones, so that hash tables hold no key that a candidate chose."""
    if len(items) != len(expected):
        return False
    missing = dict(expected)
    for key, value in items:
        try:
            key = _hashed(key)
            if key not in missing or not equal(value, missing.pop(key), tolerance):
                return False
        except TypeError:  # a key that cannot be hashed
            return False
    return True


def _hashed(value: Any) -> Any:
    """A key or element with its frozensets made; large ones, whose hashes may collide, count as unhashable."""
    if isinstance(value, tuple):
        return tuple(map(_hashed, value))
    if isinstance(value, Unhashed):
        if value.kind is not frozenset or len(value.items) > _MOST_HASHED:
            raise TypeError("unhashable")
        return frozenset(map(_hashed, value.items))
    return value


def shown(value: Any, most: int = 100) -> str:
    """A value as text of about ``most`` characters at most."""
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:most]) + ("..." if len(value) > most else "")
    if isinstance(value, Unhashed):
        return f"a {value.kind.__name__} of {len(value.items)} items"
    if isinstance(value, (list, tuple)):
        parts: list[str] = []
        for item in value:
            if sum(map(len, parts)) > most:
                parts.append("...")
                break
            parts.append(shown(item, most // 2))
        inner = ", ".join(parts)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, (int, float, complex, Opaque, type(None))):
        return repr(value)[: 2 * most]
    return f"a value of type {type(value).__name__}"
