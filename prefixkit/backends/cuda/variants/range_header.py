"""Masks of whole blocks: C++ that takes ranges of positions in place of positions (``variant_ranges.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass

from prefixkit.attention.variants.expression import ARGUMENTS, Expression, Node, Type

# Bits of the magnitude of positions and numbers, and the most bits of results in 32-bit arithmetic.
_POSITION_BITS, _MOST_BITS = 28, 31
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_POSITIONS = ("q_idx", "kv_idx")
ANYTHING = "Maybe{true, true}"


@dataclass(frozen=True)
class _Ranged:
    """A variable: a Range of integers whose magnitude takes ``bits`` bits, or a Maybe."""

    text: str
    bits: int = 0


def range_function(name: str, expression: Expression, words: list[list[int]]) -> str | None:
    """The C++ of a mask over ranges of query and key positions; None if it could never decide a block.

    Args:
        name: The function's name.
        expression: The mask.
        words: The words of each of its numbers.
    """
    values, lines = list[_Ranged | None](), list[str]()
    for number, node in enumerate(expression.nodes):
        value = _value(expression, node, [values[arg] for arg in node.args], words)
        if value is not None:
            kind = "Range" if node.type is Type.INT else "Maybe"
            lines.append(f"        [[maybe_unused]] const {kind} x{number} = {value.text};\n")
            value = _Ranged(f"x{number}", value.bits)
        values.append(value)
    result = values[-1]
    if result is None:
        return None
    given = "Range q_idx, Range kv_idx, const int* words"
    return f"    static DEVICE Maybe {name}({given}) {{\n{''.join(lines)}        return {result.text};\n    }}\n"


def _value(expression: Expression, node: Node, args: list[_Ranged | None], words: list[list[int]]) -> _Ranged | None:
    if node.type is Type.FLOAT:
        return None
    if node.op == "argument":
        name = ARGUMENTS[node.slot]
        return _Ranged(name, _POSITION_BITS) if name in _POSITIONS else None
    if node.op == "scalar":
        at, scalar = words[node.slot][0], expression.scalars[node.slot]
        if node.type is Type.BOOL:
            return _Ranged(f"Maybe{{words[{at}] != 0, words[{at}] == 0}}")
        return _Ranged(f"Range{{words[{at}], words[{at}]}}", _POSITION_BITS) if _is_small(scalar) else None
    return _logic(node, args) if node.type is Type.BOOL else _arithmetic(expression, node, args, words)


def _is_small(scalar: bool | int | float) -> bool:
    return abs(scalar) < 1 << _POSITION_BITS


def _logic(node: Node, args: list[_Ranged | None]) -> _Ranged | None:
    if node.op in ("and", "or") and any(arg is not None for arg in args):
        left, right = (ANYTHING if arg is None else arg.text for arg in args)
        return _Ranged(f"{left} {_LOGIC[node.op]} {right}")
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args):
        return None
    if node.op == "not":
        return _Ranged(f"!{known[0].text}")
    of_ranges = all(arg.bits for arg in known)
    operator = _COMPARISONS.get(node.op) if of_ranges else _LOGIC.get(node.op)
    return None if operator is None else _Ranged(f"{known[0].text} {operator} {known[1].text}")


def _arithmetic(
    expression: Expression, node: Node, args: list[_Ranged | None], words: list[list[int]]
) -> _Ranged | None:
    known = [arg for arg in args if arg is not None and arg.bits]
    if not known or len(known) < len(args):
        return None
    x, y = known[0], known[-1]
    most = max(x.bits, y.bits)
    if node.op in ("add", "sub"):
        return _within(f"{x.text} {'+' if node.op == 'add' else '-'} {y.text}", most + 1)
    if node.op in ("neg", "abs"):
        return _Ranged(f"-{x.text}" if node.op == "neg" else f"range_abs({x.text})", x.bits)
    if node.op in ("min", "max"):
        return _Ranged(f"range_{node.op}({x.text}, {y.text})", most)
    numbers = [_number(expression, arg, words) for arg in node.args]
    if node.op == "mul" and any(numbers):
        factor, other = (numbers[0], y) if numbers[0] else (numbers[1], x)
        return _within(f"{other.text} * {factor}", x.bits + y.bits)
    if node.op in ("floordiv", "mod") and numbers[1] and _scalar(expression, node.args[1]) > 0:
        name, bits = ("floor_quotients", x.bits) if node.op == "floordiv" else ("floor_remainders", y.bits)
        return _Ranged(f"{name}({x.text}, {numbers[1]})", bits)
    return None


def _within(text: str, bits: int) -> _Ranged | None:
    return _Ranged(text, bits) if bits <= _MOST_BITS else None


def _scalar(expression: Expression, number: int) -> int:
    return int(expression.scalars[expression.nodes[number].slot])


def _number(expression: Expression, number: int, words: list[list[int]]) -> str | None:
    """The word of a node's number, if the node is a number."""
    node = expression.nodes[number]
    return f"words[{words[node.slot][0]}]" if node.op == "scalar" and node.type is Type.INT else None
