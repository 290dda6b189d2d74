"""What operands of traced operations are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefixkit.attention.variants.expression import Type

# Bits of the magnitude of positions, sequences, heads and most numbers; other integers take those of their dtype.
POSITION_BITS = 28
WIDE = torch.int64


@dataclass(frozen=True)
class Value:
    """A node of an expression.

    Attributes:
        number, type: The node's number and type.
        dtype: The dtype that torch gives an integer: arithmetic wraps to it.  None for literals, which take the other
            operand's, and for values that are no integers.
        bits: At least the bits of an integer's magnitude.
    """

    number: int
    type: Type
    dtype: torch.dtype | None = None
    bits: int = 64


@dataclass(frozen=True)
class Partial:
    """A captured tensor with its first indices; the others may follow."""

    slot: int
    indices: tuple[object, ...] = ()


@dataclass(frozen=True)
class Property:
    """The device or the dtype of a value."""

    name: str
    of: object


def whole_dtype(*values: Value) -> torch.dtype:
    """The dtype of integers of these operands together, as torch promotes 0-d tensors and literals."""
    found = [value.dtype for value in values if value.type is Type.INT and value.dtype is not None]
    common = found[0] if found else WIDE
    for dtype in found[1:]:
        common = torch.promote_types(common, dtype)
    return common


def wrapped(number: int, dtype: torch.dtype) -> int:
    """An integer modulo 2 to the bits of a dtype, in its range."""
    info = torch.iinfo(dtype)
    return (number - info.min) % (1 << info.bits) + info.min


def fits(number: int, dtype: torch.dtype) -> bool:
    """Whether torch fills a tensor of this dtype with a literal; unsigned ones take negative literals modulo."""
    info = torch.iinfo(dtype)
    return (info.min or -info.max) <= number <= info.max
