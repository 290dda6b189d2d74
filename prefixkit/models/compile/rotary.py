"""Rotary embedding and appending as one op, in a compiled layer's graph.

Inductor makes a kernel for keys, one for queries, and calls ``kv_append`` between them, because that writes what
attention reads.  Where a graph, as dynamo traced it, rotates queries and keys as transformers' ``apply_rotary_pos_emb``
does, over whole heads, and only attention and ``kv_append`` read the result, ``rotary_append`` does all of it in one
launch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.models.compile.packing import changes_mode, copy_of, may_write

_Nodes = tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class _Rotation:
    """``x * cos + rotate_half(x) * sin``, of one sequence, as ``[T, heads, head_dim]``.

    Attributes:
        x: The rotated tensor, ``[1, heads, T, head_dim]``.
        cos, sin: ``[1, T, head_dim]``.
        total: The sum.
        view: The node that an op takes.
        nodes: All nodes that only serve the rotation, users before what they use; cos and sin are shared.
    """

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    total: fx.Node
    view: fx.Node
    nodes: _Nodes


def with_rotary_append(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with one op for both, or the same graph where it rotates heads in another way.

    Args:
        graph: As dynamo traced it under no_grad or inference mode, with one ``kv_append`` and one ``tree_attention``.
            It is not changed.
    """
    if torch.is_grad_enabled():
        return graph
    copied = copy_of(graph)
    found = _found(copied.graph)
    if found is None:
        return graph
    _replace(copied.graph, *found)
    copied.recompile()
    return copied


def _found(graph: fx.Graph) -> tuple[_Rotation, _Rotation, fx.Node] | None:
    """The rotations of queries and keys, and the node of ``kv_append``."""
    append, attention = (_only_call(graph, name) for name in ("kv_append", "tree_attention"))
    if append is None or attention is None or len(append.args) != 5 or not attention.args:
        return None
    query, key = _rotation(attention.args[0], attention), _rotation(append.args[0], append)
    if query is None or key is None or (query.cos, query.sin) != (key.cos, key.sin):
        return None
    at = {node: place for place, node in enumerate(graph.nodes)}
    if not at[query.total] < at[append] < at[attention] or not _alike(query, key):
        return None
    # The rotated tensors must have the same values at the place of the op, and the op runs in the mode of the call.
    first, before = min(at[node] for part in (query, key) for node in part.nodes), list(graph.nodes)[: at[append]]
    if any(may_write(node) for node in before[first:]) or any(changes_mode(node) for node in before):
        return None
    return query, key, append


def _alike(query: _Rotation, key: _Rotation) -> bool:
    """Whether all tensors are of one sequence and one dtype, and none is broadcast over rows or heads."""
    q, k = _value(query.x), _value(key.x)
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != 1 or k.shape != (1, k.shape[1], *q.shape[2:]):
        return False
    angles = [_value(node) for node in (query.cos, query.sin)]
    return (
        all(angle.shape == (1, *q.shape[2:]) for angle in angles)
        and _value(query.total).shape == q.shape
        and _value(key.total).shape == k.shape
        and len({x.dtype for x in (q, k, *angles, _value(query.total), _value(key.total))}) == 1
    )


def _replace(graph: fx.Graph, query: _Rotation, key: _Rotation, append: fx.Node) -> None:
    with graph.inserting_before(append):

        def rows(x: fx.Node) -> fx.Node:
            return graph.call_method("transpose", (graph.call_function(operator.getitem, (x, 0)), 0, 1))

        angles = [graph.call_function(operator.getitem, (x, 0)) for x in (query.cos, query.sin)]
        made = graph.call_function(
            torch.ops.prefixkit.rotary_append, (rows(query.x), rows(key.x), append.args[1], *angles, *append.args[2:])
        )
    query.view.replace_all_uses_with(made)
    graph.erase_node(append)
    for node in dict.fromkeys((*query.nodes, *key.nodes)):
        if not node.users:
            graph.erase_node(node)


def _rotation(view: object, user: fx.Node) -> _Rotation | None:
    """The rotation whose result ``view`` is, if it is rotary embedding and only ``user`` reads it."""
    if not (
        isinstance(view, fx.Node) and _is(view, "transpose") and view.args[1:] == (0, 1) and set(view.users) == {user}
    ):
        return None
    (one,) = view.all_input_nodes
    if not (_is(one, "getitem") and one.args[1] == 0 and set(one.users) == {view}):
        return None
    total = one.args[0]
    if not (isinstance(total, fx.Node) and _is(total, "add") and set(total.users) == {one}):
        return None
    terms = [found for term in total.args if (found := _factors(term, total)) is not None]
    if len(terms) != 2 or len(total.args) != 2 or total.kwargs:
        return None
    (x, cos, plain), (other, sin, crossed) = terms
    halves = _halves_swapped(other, crossed, x)
    if halves is None or not (_is_angle(cos) and _is_angle(sin)):
        return None
    nodes = (view, one, total, plain, crossed, *halves, cos, sin)
    return _Rotation(x, cos.args[0], sin.args[0], total, view, nodes)  # type: ignore[arg-type]


def _factors(term: object, user: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    if not (isinstance(term, fx.Node) and _is(term, "mul") and set(term.users) == {user}):
        return None
    if len(term.args) != 2 or not all(isinstance(factor, fx.Node) for factor in term.args):
        return None
    return term.args[0], term.args[1], term  # type: ignore[return-value]


def _halves_swapped(node: fx.Node, user: fx.Node, x: fx.Node) -> _Nodes | None:
    """The nodes of ``cat((-x[..., half:], x[..., :half]), -1)``, if ``node`` is that and only ``user`` reads it."""
    if not (_is(node, "cat") and set(node.users) == {user}):
        return None
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    parts = node.args[0]
    if dim != -1 or not isinstance(parts, (tuple, list)) or len(parts) != 2:
        return None
    negative, first = parts
    if not (isinstance(negative, fx.Node) and _is(negative, "neg") and set(negative.users) == {node}):
        return None
    (second,) = negative.all_input_nodes
    half = _value(x).shape[-1] // 2
    wanted = ((second, negative, slice(half, None, None)), (first, node, slice(None, half, None)))
    for part, user_of_part, half_of_x in wanted:
        if not (isinstance(part, fx.Node) and _is(part, "getitem") and set(part.users) == {user_of_part}):
            return None
        if part.args != (x, (Ellipsis, half_of_x)):
            return None
    if 2 * half != _value(x).shape[-1]:
        return None
    return node, negative, second, first  # type: ignore[return-value]


def _is_angle(node: fx.Node) -> bool:
    """Whether it is ``[1, T, head_dim]`` for all heads."""
    return _is(node, "unsqueeze") and node.args[1:] == (1,) and _value(node).ndim == 4


def _only_call(graph: fx.Graph, op: str) -> fx.Node | None:
    calls = [node for node in graph.nodes if node.op == "call_function" and str(node.target) == f"prefixkit.{op}"]
    return calls[0] if len(calls) == 1 else None


def _is(node: fx.Node, name: str) -> bool:
    """Whether a node is the call of a function of torch, an operator or a tensor's method by this name."""
    if node.op == "call_method":
        return node.target == name
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):  # an op of any library
        return False
    module = getattr(node.target, "__module__", None) or ""
    known = module.startswith(("torch", "_operator")) or type(node.target).__name__ == "builtin_function_or_method"
    return node.op == "call_function" and known and getattr(node.target, "__name__", "") == name


def _value(node: fx.Node) -> torch.Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, torch.Tensor)
    return value
