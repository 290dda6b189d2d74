"""Bounds of what a mask shows, derived from its expression: causality, windows, chunks.

A mask is a conjunction of terms.  Terms that compare query and key positions by a constant distance bound the visible
range, so that nothing outside is read; all terms are still evaluated inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixkit.attention.variants.expression import ARGUMENTS, Expression, Node, Type, closed

_Q, _KV = ARGUMENTS.index("q_idx"), ARGUMENTS.index("kv_idx")
# `a OP b` on integers as a sum that is at least 0: the operand with a positive sign, and the constant to add.
_ORDERS = {"ge": (0, 0), "gt": (0, -1), "le": (1, 0), "lt": (1, -1)}
_COMPARISONS = (*_ORDERS, "eq", "ne")


@dataclass(frozen=True)
class MaskBounds:
    """Bounds of what a mask shows.

    Attributes:
        causal: The mask provably shows no key after the query.
        window: The mask provably hides keys at ``q - window`` and before; None if no window is known.
        chunk: The mask provably hides keys of other chunks of this many positions; None if no chunk is known.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class _Linear:
    """``q * q_idx + kv * kv_idx + constant``."""

    q: int
    kv: int
    constant: int

    def plus(self, other: _Linear, sign: int = 1) -> _Linear:
        return _Linear(self.q + sign * other.q, self.kv + sign * other.kv, self.constant + sign * other.constant)


def mask_bounds(mask: Expression) -> MaskBounds:
    """The bounds that follow from the terms of a mask."""
    causal, windows, chunks = False, list[int](), list[int]()
    for term in (mask.nodes[number] for number in _term_numbers(mask, len(mask.nodes) - 1)):
        if (size := _same_chunk(mask, term)) is not None:
            chunks.append(size)
        for bound in _bounds(mask, term):  # each sum is at least 0
            if (bound.q, bound.kv) == (1, -1):
                causal = causal or bound.constant <= 0
            elif (bound.q, bound.kv) == (-1, 1) and bound.constant >= 0:
                windows.append(bound.constant + 1)
    return MaskBounds(causal, min(windows, default=None), min(chunks, default=None))


def without_causality(mask: Expression) -> Expression | None:
    """A mask without its terms ``kv_idx <= q_idx``, which attention applies itself; None if no term is left."""
    plain = _Linear(1, -1, 0)

    def says_more(number: int) -> bool:
        return not (mask.nodes[number].op in _ORDERS and _bounds(mask, mask.nodes[number]) == [plain])

    numbers = _term_numbers(mask, len(mask.nodes) - 1)
    left = [number for number in numbers if says_more(number)]
    if len(left) == len(numbers):
        return mask
    nodes = list(mask.nodes)
    for number in left[1:]:
        nodes.append(Node("and", (left[0] if len(nodes) == len(mask.nodes) else len(nodes) - 1, number), Type.BOOL))
    result = left[0] if len(left) == 1 else len(nodes) - 1
    return closed(nodes, result, mask.scalars, mask.tensors) if left else None


def by_distance(expression: Expression) -> bool:
    """Whether a value provably depends on positions by the distance from query to key alone."""
    found = list[bool]()
    for number, node in enumerate(expression.nodes):
        if node.op in _COMPARISONS and (difference := _difference(expression, *node.args)) is not None:
            found.append(difference.q + difference.kv == 0 or all(found[arg] for arg in node.args))
        elif (linear := _linear(expression, number)) is not None:
            found.append(linear.q + linear.kv == 0)
        else:
            found.append(all(found[arg] for arg in node.args))
    return found[-1]


def _term_numbers(mask: Expression, number: int) -> list[int]:
    """The terms of a conjunction, by number."""
    node = mask.nodes[number]
    if node.op == "and" and node.type is Type.BOOL:
        return [term for arg in node.args for term in _term_numbers(mask, arg)]
    return [number]


def _bounds(mask: Expression, term: Node) -> list[_Linear]:
    """Linear sums that are at least 0 wherever the term holds."""
    if term.op == "eq":
        difference = _difference(mask, *term.args)
        return [] if difference is None else [difference, _Linear(0, 0, 0).plus(difference, -1)]
    if term.op not in _ORDERS:
        return []
    place, step = _ORDERS[term.op]
    greater, less = term.args[place], term.args[1 - place]
    found = []
    node = mask.nodes[less]
    sides = [(greater, less)]
    if node.op == "abs":  # |x| <= y: both x <= y and -x <= y
        sides = [(greater, node.args[0])]
        negative, bound = _linear(mask, node.args[0]), _linear(mask, greater)
        if negative is not None and bound is not None:
            found.append(bound.plus(negative))
    for more, fewer in sides:
        difference = _difference(mask, more, fewer)
        if difference is not None:
            found.append(difference)
    return [_Linear(each.q, each.kv, each.constant + step) for each in found]


def _difference(mask: Expression, left: int, right: int) -> _Linear | None:
    a, b = _linear(mask, left), _linear(mask, right)
    return None if a is None or b is None else a.plus(b, -1)


def _linear(mask: Expression, number: int) -> _Linear | None:
    """An integer value as a sum of positions and a constant; None if it is not known to be one."""
    node = mask.nodes[number]
    if node.type is not Type.INT:
        return None
    if node.op == "argument":
        return _Linear(int(node.slot == _Q), int(node.slot == _KV), 0) if node.slot in (_Q, _KV) else None
    if node.op == "scalar":
        return _Linear(0, 0, int(mask.scalars[node.slot]))
    parts = [_linear(mask, arg) for arg in node.args]
    if node.op == "neg" and parts[0] is not None:
        return _Linear(0, 0, 0).plus(parts[0], -1)
    if node.op in ("add", "sub") and parts[0] is not None and parts[1] is not None:
        return parts[0].plus(parts[1], 1 if node.op == "add" else -1)
    return None


def _same_chunk(mask: Expression, term: Node) -> int | None:
    """The ``size`` in a term ``q // size == kv // size``; None for any other term."""
    if term.op != "eq":
        return None
    divided = [mask.nodes[arg] for arg in term.args]
    if any(node.op != "floordiv" for node in divided):
        return None
    sides = {(mask.nodes[node.args[0]].op, mask.nodes[node.args[0]].slot) for node in divided}
    sizes = {mask.scalars[of.slot] for node in divided if (of := mask.nodes[node.args[1]]).op == "scalar"}
    both = sides == {("argument", _Q), ("argument", _KV)}
    if not both or len(sizes) != 1 or any(mask.nodes[node.args[1]].op != "scalar" for node in divided):
        return None
    size = int(sizes.pop())
    return size if size >= 1 else None
