"""Linear biases such as ALiBi's: by how much a bias grows from one key to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixkit.attention.variants.expression import ARGUMENTS, Expression, Node, Type

_CASTS = ("int", "float")


@dataclass(frozen=True)
class _Growth:
    """Growth per key: ``sign`` times the value of node ``factor``, or times 1 if that is None."""

    sign: int = 0
    factor: int | None = None


def slope_of(score: Expression) -> Expression | None:
    """By how much a function's score grows from a key's position to the next, if that is the same for all keys.

    The result depends only on the sequence, the head and the query, and has all scalars and captured tensors of
    ``score`` in their slots.  None if the function does anything but add a bias, if the bias does not depend on the
    key, or if it is not known to be linear in the key's position.
    """
    if score.bias is None:
        return None
    nodes, known = list(score.nodes), list[_Growth | None]()
    for node in score.nodes:
        known.append(_growth(node, [known[arg] for arg in node.args], nodes))
    found = known[-1]
    if found is None or not found.sign or found.factor is None:
        return None
    nodes.append(Node("float", (found.factor,), Type.FLOAT))
    if found.sign < 0:
        nodes.append(Node("neg", (len(nodes) - 1,), Type.FLOAT))
    return Expression(tuple(nodes), score.scalars, score.tensors)


def _growth(node: Node, args: Sequence[_Growth | None], nodes: list[Node]) -> _Growth | None:
    """The growth of a node, None if it is not known; products of two factors are appended to ``nodes``."""
    if node.op == "argument":
        return _Growth(int(ARGUMENTS[node.slot] == "kv_idx"))
    if all(arg == _Growth() for arg in args):
        return _Growth()
    grows = [arg for arg in args if arg != _Growth()]
    grown = grows[0]
    if grown is None or len(grows) > 1:
        return None
    second = args[-1] is grown and len(args) > 1
    if node.op in ("add", "sub"):
        return _Growth(-grown.sign if node.op == "sub" and second else grown.sign, grown.factor)
    if node.op == "neg":
        return _Growth(-grown.sign, grown.factor)
    if node.op in _CASTS and (node.op == "float" or nodes[node.args[0]].type is Type.INT):
        return grown
    if node.op != "mul":
        return None
    factor = node.args[0 if second else 1]
    if grown.factor is not None:
        nodes.append(Node("mul", (grown.factor, factor), node.type))
        factor = len(nodes) - 1
    return _Growth(grown.sign, factor)
