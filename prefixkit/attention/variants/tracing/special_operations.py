"""Functions of torch and Python that are more than one operation of expressions, or none."""

from __future__ import annotations

from typing import Any

import torch

from prefixkit.attention.variants.expression import Captured, Type
from prefixkit.attention.variants.tracing.expression_builder import ExpressionBuilder as Builder
from prefixkit.attention.variants.tracing.expression_builder import Special
from prefixkit.attention.variants.tracing.traced_values import Partial, Property, Value

_FILLED = {"ones": 1, "zeros": 0}
_WHOLE = {"long": torch.int64, "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8}
_OF_MEMORY = ("device", "layout", "memory_format", "pin_memory", "requires_grad")  # say nothing about a value
_MOST_POWER = 16  # of an integer


def _getitem(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Partial:
    of, index = given
    if not isinstance(of, Partial):
        to.fail("only captured tensors can be indexed")
    return Partial(of.slot, (*of.indices, *(index if isinstance(index, tuple) else (index,))))


def _getattr(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Property:
    of, attribute = given
    if attribute not in ("device", "dtype"):
        to.fail(f"the attribute {attribute!r} is not known: a function works on single numbers")
    return Property(attribute, of)


def _to(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Any:
    of, *others = given
    for target in (*others, *options.values()):
        moves = isinstance(target, torch.device | str) or getattr(target, "name", "") == "device"
        if moves and isinstance(of, Partial) and not of.indices:
            to.tensors[of.slot] = Captured(to.tensors[of.slot].tensor, follows=True)
        elif isinstance(target, torch.dtype) and not moves:
            of = to.to_dtype(to.value(of), target)
        elif isinstance(target, Property | Value | Partial) and not moves:
            of = to.like(to.value(of), to.value(target.of if isinstance(target, Property) else target))
        elif not moves and not isinstance(target, bool):
            to.fail(f"a value cannot be brought to {target!r}")
    return of


def _to_whole(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Value:
    (of,) = to.operands(name, given, options, "input")
    return to.to_dtype(to.value(of), _WHOLE[name])


def _type_as(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Value:
    of, other = to.operands(name, given, options, "input", "other")
    return to.like(to.value(of), to.value(other))


def _divide(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Value:
    mode = options.pop("rounding_mode", None)
    if mode not in (None, "floor"):
        to.fail(f"{name!r} is taken with rounding_mode None or 'floor', not {mode!r}")
    return to.apply("div" if mode is None else "floordiv", *to.operands(name, given, options, "input", "other"))


def _logical(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Value:
    op = name.removeprefix("logical_")
    operands = to.operands(name, given, options, *(("input",) if op == "not" else ("input", "other")))
    return to.apply(op, *(to.cast(to.value(each), Type.BOOL) for each in operands))


def _clamp(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Any:
    of, low, high = to.operands(name, given, options, "input", "min", "max", optional=2)
    of = of if low is None else to.apply("max", of, low)
    return of if high is None else to.apply("min", of, high)


def _masked_fill(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Value:
    of, mask, value = to.operands(name, given, options, "input", "mask", "value")
    return to.like(to.apply("where", mask, value, of), to.value(of))


def _square(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Value:
    return _power(to, name, [*to.operands(name, given, options, "input"), 2], {})


def _power(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Value:
    of, exponent = to.operands(name, given, options, "input", "exponent")
    base = to.value(of)
    if isinstance(exponent, int) and exponent == 2 and base.type is Type.FLOAT:
        return to.apply("mul", base, base)
    if Type.FLOAT in (base.type, to.value(exponent).type):
        return to.apply("pow", base, exponent)
    if not isinstance(exponent, int) or not 0 <= exponent <= _MOST_POWER:
        to.fail(
            f"integers are raised to literal exponents from 0 to {_MOST_POWER} only; write 1 << n for 2 ** n, or raise "
            "a float, as in q_idx.float() ** x"
        )
    square = to.cast(base, Type.INT)
    found = None if exponent else to.like(to.value(1), square)
    while exponent:
        if exponent & 1:
            found = square if found is None else to.apply("mul", found, square)
        exponent >>= 1
        if exponent:
            square = to.apply("mul", square, square)
    assert found is not None
    return found


def _filled(to: Builder, name: str, given: list[Any], options: dict[str, Any]) -> Value:
    """``x.new_ones(())``, ``torch.zeros_like(x)`` and the like: a number."""
    number = next((filling for word, filling in _FILLED.items() if word in name), None)
    names = ("input", *(("size",) if name.startswith("new_") else ()), *(("fill_value",) if number is None else ()))
    options = {key: value for key, value in options.items() if key not in _OF_MEMORY}
    dtype = options.pop("dtype", None)
    operands = to.operands(name, given, options, *names)
    value = to.value(operands[-1] if number is None else number)
    if isinstance(dtype, torch.dtype):
        return to.to_dtype(value, dtype)
    return to.like(value, to.value(operands[0] if dtype is None else dtype.of))


# By the names of torch's functions and methods.
SPECIAL: dict[str, Special] = {
    "getitem": _getitem,
    "getattr": _getattr,
    "to": _to,
    "type": _to,
    "type_as": _type_as,
    "div": _divide,
    "divide": _divide,
    "clamp": _clamp,
    "clip": _clamp,
    "masked_fill": _masked_fill,
    "square": _square,
    "pow": _power,
    **dict.fromkeys(_WHOLE, _to_whole),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor", "logical_not"), _logical),
    **dict.fromkeys(("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"), _filled),
}
