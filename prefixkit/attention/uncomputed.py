"""Which tokens run next: those without KV, ancestors first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.visible import lowest_positions
from prefixkit.tree.arrays import Ints, Longs
from prefixkit.tree.node import Node
from prefixkit.tree.snapshot import TreeSnapshot
from prefixkit.tree.spelling import Spelling

# Default prompt tokens of a step: on a GPU a step should have enough to fill the device.
_CPU_CHUNK, _GPU_CHUNK = 1024, 8192


def prefill_chunk_for(device: torch.device) -> int:
    """Prompt tokens that a step computes by default."""
    return _GPU_CHUNK if device.type == "cuda" else _CPU_CHUNK


def tokens_of(queries: Queries, nodes: Sequence[Node], spelling: Spelling | None = None) -> NDArray[np.int32]:
    """``[rows]`` token ids of query rows, given the tree's nodes in the snapshot's order, and its spelling."""
    keys = _keys_of(queries, nodes)
    return keys if spelling is None else spelling.tokens(keys)


def _keys_of(queries: Queries, nodes: Sequence[Node]) -> NDArray[np.int32]:
    runs = zip(queries.node.tolist(), queries.begin.tolist(), queries.end.tolist(), strict=True)
    return np.concatenate([nodes[node].tokens[begin:end] for node, begin, end in runs])


def choose_queries(
    snapshot: TreeSnapshot,
    decoding: Collection[int],
    wanted: Collection[int],
    prefill_budget: int,
    wanted_from: Collection[int] | None = None,
    states: Sequence[Node] | None = None,
    texts: tuple[Spelling, Sequence[Node]] | None = None,
) -> StepTree | None:
    """Pick the uncomputed tokens of one step.

    Tokens that sequences have just sampled always run; prompt tokens run up to a budget, in depth-first order, so that
    the samples of the first prompts can run while later prompts are still being computed.

    Args:
        decoding: Nodes whose uncomputed tokens were sampled or chosen by a beam: they do not count against the budget.
        wanted: Nodes with tokens whose logits are wanted; those of these tokens that have KV rerun.
        prefill_budget: How many prompt tokens may run.
        wanted_from: For each ``wanted`` node, the first token whose logits are wanted; None: the node's last token.
        states: The tree's nodes, if layers keep a state: tokens between the last state and the first token that runs
            rerun, and do not count against the budget.
        texts: The tree's spelling and nodes, if tokens see later ones: the uncomputed tokens of a span run together,
            even if they alone exceed the budget.

    Returns:
        The tree with these queries, or None if no token needs to run.
    """
    begin, end = snapshot.computed.copy(), snapshot.length
    with_logits = np.asarray(wanted, dtype=np.int32)
    first_wanted = end[with_logits] - 1 if wanted_from is None else np.asarray(wanted_from, dtype=np.int32)
    begin[with_logits] = np.minimum(begin[with_logits], first_wanted)
    nodes = np.flatnonzero(begin < end).astype(np.int32)
    if len(nodes) == 0:
        return None
    is_prompt = np.ones(snapshot.num_nodes, dtype=bool)
    is_prompt[np.asarray(decoding, dtype=np.int32)] = False
    first, want = begin[nodes], (end - begin)[nodes]
    # Ancestors come first, so if the budget ends within a node, no token below the node is taken.  Sampled tokens have
    # no uncomputed ancestors: prompts are computed before their samples start.
    spent = np.cumsum(np.where(is_prompt[nodes], want, 0))
    take = np.where(is_prompt[nodes], np.clip(want - (spent - prefill_budget), 0, want), want)
    if texts is not None:
        cut = (first + take > snapshot.computed[nodes]) & (take < want)
        take = _whole_spans(*texts, nodes, first, take, cut)
    runs = np.flatnonzero(take)
    queries = Queries(nodes[runs], first[runs], (first + take)[runs].astype(np.int32))
    if texts is not None:
        spelling, every = texts
        return StepTree(snapshot, queries, spelling.left(_keys_of(queries, every)))
    return StepTree(snapshot, queries if states is None else _from_states(snapshot, queries, states))


def path_queries(snapshot: TreeSnapshot, ends: NDArray[np.int64], positions: NDArray[np.int64]) -> Queries:
    """The tokens without KV on the paths to some nodes' ends, and all tokens of each path from a given position on.

    Args:
        ends: ``[paths]`` the nodes where paths end; a node may occur several times.
        positions: ``[paths]`` the position from which on a path's tokens run whether or not they have KV.
    """
    order = np.argsort(ends, kind="stable")
    # The paths through a node are those that end in its subtree, which are consecutive in this order.
    begin, end = np.searchsorted(ends[order], (np.arange(snapshot.num_nodes), snapshot.subtree_end))
    node = np.flatnonzero(end > begin)
    lowest = lowest_positions(positions[order], begin[node], end[node]) - snapshot.start[node]
    first, length = np.clip(lowest, 0, snapshot.computed[node]), snapshot.length[node]
    runs = first < length
    return Queries(node[runs].astype(np.int32), first[runs].astype(np.int32), length[runs])


def _whole_spans(
    spelling: Spelling, every: Sequence[Node], nodes: Ints, first: Ints, take: Longs, cut: NDArray[np.bool_]
) -> Longs:
    """``take``, changed so that no run that is ``cut`` ends inside a span: it ends before the span, or behind it if no
    other token would run.
    """
    take = take.copy()
    for run in np.flatnonzero(cut & (take > 0)).tolist():
        begin, end = int(first[run]), int(first[run] + take[run])
        key = every[nodes[run]].tokens[end : end + 1]
        if place := int(spelling.place(key)[0]):
            take[run] = max(end - place - begin, 0)
            if not take.any():
                take[run] = end + int(spelling.left(key)[0]) + 1 - begin
    return take


def _from_states(snapshot: TreeSnapshot, queries: Queries, nodes: Sequence[Node]) -> Queries:
    """The queries, and tokens that rerun so that a state exists, or is made, before each run."""
    begin = dict(zip(queries.node.tolist(), queries.begin.tolist(), strict=True))
    end = dict(zip(queries.node.tolist(), queries.end.tolist(), strict=True))
    left = [*begin]
    for index in left:  # the list grows while it is read
        node, first = nodes[index], begin[index]
        if first and node.state_at(first) < 0:
            first = begin[index] = max((at for at in node.states if at <= first), default=0)
        above = int(snapshot.parent[index])
        if first == 0 and above >= 0 and above not in begin and node.state_at(0) < 0:
            begin[above] = end[above] = int(snapshot.length[above])
            left.append(above)
    order = sorted(begin)
    return Queries(*(np.array([of(index) for index in order], np.int32) for of in (int, begin.get, end.get)))
