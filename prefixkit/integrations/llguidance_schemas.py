"""Finds the bounds in a JSON schema that llguidance (1.9) rounds, or that end the process."""

from __future__ import annotations

from typing import Any

_MOST = 2**53  # llguidance holds bounds as 64-bit floats, and computes with their digits
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DATA = {"const", "enum", "default", "examples"}  # keywords whose value is data, whatever it looks like
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}


def refuse_large_bounds(schema: Any) -> None:
    """Raise ValueError if a bound, anywhere in a schema, is an integer that llguidance cannot hold exactly.

    A reference may point anywhere, so a schema is looked for under every keyword, known or not.
    """
    left = [("#", schema)]
    while left:
        path, one = left.pop()
        if isinstance(one, list):
            left += [(f"{path}/{number}", below) for number, below in enumerate(one)]
        if not isinstance(one, dict):
            continue
        for name in _BOUNDS:
            if _large(name, one.get(name)):
                raise ValueError(
                    f"json_schema: llguidance cannot hold {name!r} at {path}, {one[name]}, exactly: bounds must be "
                    "between -2**53 and 2**53; use a smaller bound, or a pattern of digits"
                )
        for name, below in one.items():
            if name in _BY_NAME and isinstance(below, dict):
                left += [(f"{path}/{name}/{key}", own) for key, own in below.items()]
            elif name not in _DATA:
                left.append((f"{path}/{name}", below))


def _large(name: str, bound: Any) -> bool:
    """Whether a bound, or the first integer within an exclusive one, is beyond the integers that floats hold."""
    return isinstance(bound, int | float) and abs(bound) > _MOST - name.startswith("exclusive")
