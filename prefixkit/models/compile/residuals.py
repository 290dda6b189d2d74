"""Residual adds within the sums of tensor parallelism, in a compiled layer's graph.

Inductor's kernel for such an add would read a sum that ``sum_parts`` has just written.  If a graph that dynamo traced
adds a tensor to a sum that nothing else reads, the op adds that tensor too.

A layer adds two sums to what it got: ``between = residual + attention``, which a norm reads, and ``between + mlp``.  In
one process inductor's kernels read ``residual`` and ``attention`` for both, and round ``between`` in neither.  So the
second sum takes both as residuals, and the first takes none: its add stays, and becomes a part of the norm's kernel.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.models.compile.packing import changes_mode, copy_of, may_write

_ADDS = (operator.add, torch.add, "add", "__add__")
_ADDS_IN_PLACE = (operator.iadd, "add_", "__iadd__")  # to the first argument


def with_residuals(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with residuals as arguments of ``sum_parts``, or the same graph if it adds none.

    Args:
        graph: The graph that dynamo traced under no_grad or inference mode.  It is not changed.
    """
    if torch.is_grad_enabled() or not _found(graph.graph):
        return graph
    copied = copy_of(graph)
    found = {add: (total, residual) for total, residual, add in _found(copied.graph)}
    between = _between(list(copied.graph.nodes), found)
    kept, now = set[fx.Node](), dict[fx.Node, fx.Node]()  # adds that stay, and the sums that others have become
    for add, (total, residual) in found.items():
        if add in between and residual not in kept:
            kept.add(add)  # for what else reads it; a later sum takes its two terms
            continue
        first = now.get(residual, residual)
        terms = [*reversed(found[first])] if first in kept else [first]
        total.args = (*total.args, *(now.get(term, term) for term in terms))
        add.replace_all_uses_with(total)
        copied.graph.erase_node(add)
        now[add] = total
    for add in kept:
        if not add.users:
            copied.graph.erase_node(add)
    copied.recompile()
    return copied


def _between(nodes: list[fx.Node], found: dict[fx.Node, tuple[fx.Node, fx.Node]]) -> set[fx.Node]:
    """Adds to sums, of those ``found``, to which one later sum is added, and whose terms that sum can read instead."""
    at, later = {node: place for place, node in enumerate(nodes)}, [residual for _, residual in found.values()]
    return {
        residual
        for total, residual in found.values()
        if residual in found and later.count(residual) == 1 and residual.target not in _ADDS_IN_PLACE
        if not any(may_write(node) for node in nodes[at[residual] : at[total]])
    }


def _found(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """Sums without a residual, the tensor added to each, and the node that adds it."""
    nodes, found = list(graph.nodes), []
    at = {node: place for place, node in enumerate(nodes)}
    modes = next((place for place, node in enumerate(nodes) if changes_mode(node)), len(nodes))
    for total in graph.find_nodes(op="call_function", target=torch.ops.prefixkit.sum_parts):
        if len(total.args) != 3 or total.kwargs or len(total.users) != 1:
            continue
        (add,) = total.users
        residual = _added_to(total, add)
        # The op reads the residual before it computes the sum, in the modes of the graph's caller.
        if residual is None or at[residual] > at[total] or at[add] > modes:
            continue
        if not any(may_write(node) for node in nodes[at[total] : at[add]]):
            found.append((total, residual, add))
    return found


def _added_to(total: fx.Node, add: fx.Node) -> fx.Node | None:
    """The tensor that ``add`` adds to a sum, if ``add`` does nothing else and the tensor is like the sum; else None."""
    if add.op not in ("call_function", "call_method") or add.kwargs or len(add.args) != 2:
        return None
    one, other = add.args
    if not (add.target in _ADDS or (add.target in _ADDS_IN_PLACE and one is total)):
        return None
    residual = other if one is total else one
    if not isinstance(residual, fx.Node) or residual is total:
        return None
    first, second = (node.meta.get("example_value") for node in (total, residual))
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not second.is_contiguous():
        return None
    like = first.dtype == second.dtype and first.device == second.device and first.shape == second.shape
    return residual if like else None
