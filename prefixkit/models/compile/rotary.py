"""Rotary embedding and appending as one op, in a compiled layer's graph.

Inductor makes a kernel for keys and one for queries, and calls ``kv_append`` between them, because ``kv_append`` writes
what attention reads.  If a graph that dynamo traced rotates queries and keys as transformers' ``apply_rotary_pos_emb``
does, over whole heads, and only attention and ``kv_append`` read the result, ``rotary_append`` does all of this in one
launch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.models.compile.packing import changes_mode, copy_of, may_write

ops = torch.ops.prefixkit


class _Rotation(NamedTuple):
    """A match of :func:`_rotations`."""

    nodes: tuple[fx.Node, ...]  # all nodes, users before their inputs; the first is an op's argument
    total: fx.Node  # the node that adds both products
    x: fx.Node  # the rotated tensor, [1, heads, T, head_dim]
    cos: fx.Node  # [1, T, head_dim], like sin
    sin: fx.Node


@functools.cache
def _rotations(half: int) -> SubgraphMatcher:
    """A matcher of transformers' ``apply_rotary_pos_emb`` of one sequence, transposed to ``[T, heads, head_dim]``."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return ((x * cos) + (swapped * sin))[0].transpose(0, 1)

    return SubgraphMatcher(fx.symbolic_trace(rotate).graph)


def with_rotary_append(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with one op for rotation and appending, or the same graph if it rotates heads in another way.

    Args:
        graph: The graph that dynamo traced under no_grad or inference mode, with one ``kv_append`` and one
            ``tree_attention``.  It is not changed.
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
    calls = [graph.find_nodes(op="call_function", target=op) for op in (ops.kv_append, ops.tree_attention)]
    if [len(found) for found in calls] != [1, 1]:
        return None
    (append,), (attention,) = calls
    if len(append.args) != 5 or not attention.args:
        return None
    query, key = _rotation(attention), _rotation(append)
    if query is None or key is None or not _alike(query, key):
        return None
    at = {node: place for place, node in enumerate(graph.nodes)}
    if not at[query.total] < at[append] < at[attention]:
        return None
    # The rotated tensors must be unchanged where the op runs, and the op runs in the modes of the graph's caller.
    first, before = min(at[node] for node in query.nodes + key.nodes), list(graph.nodes)[: at[append]]
    if any(may_write(node) for node in before[first:]) or any(changes_mode(node) for node in before):
        return None
    return query, key, append


def _rotation(user: fx.Node) -> _Rotation | None:
    """The rotation whose result is the first argument of ``user``, if only ``user`` reads it."""
    view = user.args[0]
    if not isinstance(view, fx.Node) or set(view.users) != {user}:
        return None
    for match in _rotations(_value(view).shape[-1] // 2).match(user.graph):
        x, *wide = match.placeholder_nodes
        if match.returning_nodes == [view] and all(
            isinstance(one, fx.Node) and one.target == "unsqueeze" and one.args[1:] == (1,) for one in wide
        ):
            nodes = [node for node in match.nodes_map.values() if node is not x and node not in wide]
            cos, sin = (one.args[0] for one in wide)
            return _Rotation((*nodes, *wide), nodes[2], x, cos, sin)  # type: ignore[arg-type]
    return None


def _alike(query: _Rotation, key: _Rotation) -> bool:
    """Whether all tensors hold one sequence and have one dtype, share their angles, and broadcast none over rows."""
    q, k = _value(query.x), _value(key.x)
    if query[3:] != key[3:] or q.ndim != 4 or k.ndim != 4 or q.shape[3] % 2:
        return False
    q_shape, k_shape = ((1, x.shape[1], *q.shape[2:]) for x in (q, k))
    shapes = {query.x: q_shape, query.total: q_shape, key.x: k_shape, key.total: k_shape}
    shapes |= dict.fromkeys((query.cos, query.sin), (1, *q.shape[2:]))
    return len({_value(node).dtype for node in shapes}) == 1 and all(
        _value(node).shape == shape for node, shape in shapes.items()
    )


def _replace(graph: fx.Graph, query: _Rotation, key: _Rotation, append: fx.Node) -> None:
    with graph.inserting_before(append):
        q, k, cos, sin = (_add(graph, operator.getitem, x, 0) for x in (query.x, key.x, query.cos, query.sin))
        q, k = (_add(graph, torch.transpose, x, 0, 1) for x in (q, k))
        made = graph.call_function(ops.rotary_append, (q, k, append.args[1], cos, sin, *append.args[2:]))
        made.meta["example_value"] = torch.empty_like(_value(q), memory_format=torch.contiguous_format)
    query.nodes[0].replace_all_uses_with(made)
    graph.erase_node(append)
    for node in dict.fromkeys(query.nodes + key.nodes):  # both share the angles' nodes
        if not node.users:
            graph.erase_node(node)


def _add(graph: fx.Graph, view: Callable[..., Tensor], x: fx.Node, *args: int) -> fx.Node:
    """A view with its example value: torch caches no graph on disk that has nodes without one."""
    node = graph.call_function(view, (x, *args))
    node.meta["example_value"] = view(_value(x), *args)
    return node


def _value(node: fx.Node) -> Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor)
    return value
