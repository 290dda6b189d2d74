"""Which tokens run next: those whose KV is pending, ancestors first."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.formats import Queries
from prefixkit.tree.snapshot import TreeSnapshot


def choose_queries(
    snapshot: TreeSnapshot, decoding: Collection[int], asking: Collection[int], prefill_budget: int
) -> Queries | None:
    """Pick the pending tokens of one step.

    Tokens that sequences drew last always run; prompt tokens run up to a budget, in depth-first order, so that the
    samples of the first prompts can go on while later prompts are still being computed.

    Args:
        snapshot: The tree.
        decoding: Nodes whose pending tokens were drawn by a sample or beam: outside the budget.
        asking: Nodes after whose last token logits are wanted; where nothing is pending, that token runs once more.
        prefill_budget: How many prompt tokens may run.

    Returns:
        The queries, or None where nothing needs to run.
    """
    begin, end = snapshot.ready.copy(), snapshot.length
    again = np.fromiter((node for node in asking if begin[node] == end[node]), dtype=np.int32)
    begin[again] -= 1
    nodes = np.flatnonzero(begin < end).astype(np.int32)
    if len(nodes) == 0:
        return None
    is_drawn = np.zeros(snapshot.num_nodes, dtype=bool)
    is_drawn[list(decoding)] = True
    prompt_nodes = nodes[~is_drawn[nodes]]
    if (end - begin)[prompt_nodes].sum() <= prefill_budget:
        return Queries(nodes, begin[nodes], end[nodes])
    return _within_budget(snapshot, nodes, is_drawn, begin, prefill_budget)


def _within_budget(
    snapshot: TreeSnapshot, nodes: NDArray[np.int32], is_drawn: NDArray[np.bool_], begin: NDArray[np.int32], budget: int
) -> Queries:
    taken = []
    blocked_until = 0  # descendants of a node that is not yet complete must wait for it
    for node in nodes.tolist():
        if node < blocked_until:
            continue
        want = int(snapshot.length[node] - begin[node])
        take = want if is_drawn[node] else min(want, budget)
        if not is_drawn[node]:
            budget -= take
        if take:
            taken.append((node, begin[node], begin[node] + take))
        if take < want:
            blocked_until = int(snapshot.subtree_end[node])
    runs = np.array(taken, dtype=np.int32)
    return Queries(runs[:, 0].copy(), runs[:, 1].copy(), runs[:, 2].copy())


def last_rows(snapshot: TreeSnapshot, queries: Queries) -> NDArray[np.int64]:
    """``[nodes]`` the row of each node's last token, -1 where it does not run."""
    rows = np.full(snapshot.num_nodes, -1, dtype=np.int64)
    row_end = np.cumsum(queries.end - queries.begin)
    complete = queries.end == snapshot.length[queries.node]
    rows[queries.node[complete]] = row_end[complete] - 1
    return rows
