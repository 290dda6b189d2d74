"""Finds the numbers in a JSON schema that llguidance (1.9) rounds, or that end the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prefixkit.integrations.grammar_text import beyond

_MOST = 2**53  # llguidance holds numbers as 64-bit floats, and computes with the digits of bounds
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DATA = {"const", "enum", "default", "examples"}  # keywords whose value is data, whatever it looks like
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}


def refuse_large_numbers(schema: Any) -> None:
    """Raise ValueError if a bound or an allowed value, anywhere in a schema, is too large for llguidance.

    A reference may point anywhere, so a schema is looked for under every keyword, known or not.
    """
    left = [("#", schema)]
    while left:
        path, one = left.pop()
        if isinstance(one, list):
            left += [(f"{path}/{number}", below) for number, below in enumerate(one)]
        if not isinstance(one, dict):
            continue
        if (large := next(_large(one), None)) is not None:
            raise ValueError(
                f"json_schema: llguidance cannot hold {large[0]!r} at {path}, {large[1]}, exactly: bounds and allowed "
                "integers must be between -2**53 and 2**53; use smaller ones, or a string with a pattern of digits"
            )
        for name, below in one.items():
            if name in _BY_NAME and isinstance(below, dict):
                left += [(f"{path}/{name}/{key}", own) for key, own in below.items()]
            elif name not in _DATA:
                left.append((f"{path}/{name}", below))


def _large(schema: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values of bounds that are too large, and the first such integer among the allowed values."""
    for name in _BOUNDS:
        bound, most = schema.get(name), _MOST - name.startswith("exclusive")  # the first allowed one must fit too
        if isinstance(bound, int | float) and abs(bound) > most:
            yield name, bound
    for name in ("const", "enum"):
        if (value := beyond(schema.get(name), -_MOST, _MOST)) is not None:
            yield name, value
