"""Block-sparse rows: which queries read which KV.

After FlashInfer (section 3.1): a BSR matrix has groups of queries as rows and blocks of KV as columns, and attention over a
tree is a sum of such matrices.  Here a row's columns are slices of tree nodes, and each slice stands for the page blocks
it covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.ancestry import Longs, mark
from prefixkit.attention.sharing import CostModel, HeadShape, decide_sharing
from prefixkit.tree.snapshot import Ints, TreeSnapshot

# As a segment's end: up to the node's length at the time of the run.  A leaf can grow under a plan.
OPEN = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Queries:
    """The query rows of one step: run ``r`` is tokens ``[begin[r], end[r])`` of node ``node[r]``.

    Runs are in depth-first order with one run per node at most; the rows of the step are the runs laid end to end.
    """

    node: Ints
    begin: Ints
    end: Ints

    @property
    def num_rows(self) -> int:
        return int((self.end - self.begin).sum())

    def rows_per_node(self, num_nodes: int) -> Ints:
        """``[nodes]`` how many rows sit in each node."""
        rows = np.zeros(num_nodes, dtype=np.int32)
        rows[self.node] = self.end - self.begin
        return rows

    def row_node(self) -> Ints:
        """``[rows]`` the node of each row."""
        return np.repeat(self.node, self.end - self.begin)

    def row_offset(self) -> Ints:
        """``[rows]`` the token within its node that each row is."""
        count = self.end - self.begin
        first_row = np.cumsum(count) - count
        offset: Ints = (np.arange(count.sum()) - np.repeat(first_row - self.begin, count)).astype(np.int32)
        return offset


@dataclass(frozen=True, eq=False)
class BSR:
    """Block-sparse rows.

    Attributes:
        q_begin, q_end: ``[rows]`` the contiguous queries of each row.
        causal: ``[rows]`` True where a query sees only keys at its own position or before; False where it sees them all.
        indptr: ``[rows + 1]`` bounds of each row's segments.
        node, begin, end: ``[segments]`` tokens ``[begin, end)`` of ``node``; ``end`` may be :data:`OPEN`.
    """

    q_begin: Ints
    q_end: Ints
    causal: NDArray[np.bool_]
    indptr: Ints
    node: Ints
    begin: Ints
    end: Ints

    @property
    def num_rows(self) -> int:
        return len(self.q_begin)

    def row_segments(self, row: int) -> list[tuple[int, int, int]]:
        """The ``(node, begin, end)`` slices that a row reads, ancestors first."""
        part = slice(int(self.indptr[row]), int(self.indptr[row + 1]))
        return list(zip(self.node[part].tolist(), self.begin[part].tolist(), self.end[part].tolist(), strict=True))


def visible_lengths(snapshot: TreeSnapshot, queries: Queries) -> Ints:
    """``[nodes]`` tokens of each node whose KV exists once this step has appended its own."""
    visible = snapshot.ready.copy()
    visible[queries.node] = np.maximum(visible[queries.node], queries.end)
    return visible


def check_queries(snapshot: TreeSnapshot, queries: Queries) -> None:
    """Raise ValueError unless the runs are in order, lie inside their nodes, and miss no KV before or above them."""
    node, begin, end = queries.node, queries.begin, queries.end
    if len(node) == 0:
        raise ValueError("a step needs at least one query, got none")
    if np.any(node[1:] <= node[:-1]) or node[0] < 0 or node[-1] >= snapshot.num_nodes:
        raise ValueError(
            f"query runs must name nodes 0..{snapshot.num_nodes - 1} in ascending order, got {node.tolist()}"
        )
    if np.any(begin < 0) or np.any(begin >= end) or np.any(end > snapshot.length[node]):
        raise ValueError("each query run must be a non-empty slice of its node's tokens")
    if np.any(begin > snapshot.ready[node]):
        bad = int(node[np.argmax(begin > snapshot.ready[node])])
        raise ValueError(
            f"node {bad}: a query run must begin where the KV is complete, at {snapshot.ready[bad]} or before"
        )
    incomplete = visible_lengths(snapshot, queries) < snapshot.length
    if not incomplete.any():
        return
    rows = np.concatenate(([0], np.cumsum(queries.rows_per_node(snapshot.num_nodes))))
    below = rows[snapshot.subtree_end] - rows[1:]
    if np.any(incomplete & (below > 0)):
        bad = int(np.argmax(incomplete & (below > 0)))
        raise ValueError(
            f"node {bad} has KV for fewer than its {snapshot.length[bad]} tokens, but queries sit below it: "
            "compute ancestors first or in the same step"
        )


def decompose(
    snapshot: TreeSnapshot,
    queries: Queries,
    shape: HeadShape,
    cost: CostModel,
    shared: NDArray[np.bool_] | None = None,
) -> BSR:
    """Split attention over the tree into block-sparse rows, so that each query meets each visible token exactly once.

    Every shared node becomes a dense row: all queries below it read all its tokens.  Every node with queries of its own
    becomes a causal row.  The tokens of a node that is not shared join the first rows below it.

    Args:
        snapshot: The tree.
        queries: The step's query rows; see :func:`check_queries` for what they must satisfy.
        shape: The heads, for the cost.
        cost: Decides which nodes are shared.
        shared: ``[nodes]`` overrides that decision; for tests and studies.

    Returns:
        The rows in the order of their nodes, a node's dense row before its causal one.
    """
    check_queries(snapshot, queries)
    own = queries.rows_per_node(snapshot.num_nodes)
    row_of_node = np.concatenate(([0], np.cumsum(own))).astype(np.int32)
    below = row_of_node[snapshot.subtree_end] - row_of_node[1:]
    if shared is None:
        shared = decide_sharing(snapshot, own, below, shape, cost)
    cut = shared & (below > 0)
    places = np.flatnonzero(np.stack((cut, own > 0), axis=1))
    node, causal = places >> 1, (places & 1).astype(bool)
    indptr, segments = _inherited(snapshot, cut, ~cut & (below > 0) & (snapshot.length > 0), node)
    length = snapshot.length
    segments[indptr[1:] - 1] = node
    end = length[segments]
    end[indptr[1:][causal] - 1] = OPEN
    return BSR(
        q_begin=row_of_node[np.where(causal, node, node + 1)],
        q_end=row_of_node[np.where(causal, node + 1, snapshot.subtree_end[node])],
        causal=causal,
        indptr=indptr.astype(np.int32),
        node=segments.astype(np.int32),
        begin=np.zeros(len(segments), dtype=np.int32),
        end=end,
    )


def _inherited(
    snapshot: TreeSnapshot, cut: NDArray[np.bool_], folded: NDArray[np.bool_], node: Longs
) -> tuple[Longs, Longs]:
    """Each row's folded ancestors below its nearest shared one, root first, and a place for the row's own ``node``."""
    if not folded.any():
        return np.arange(len(node) + 1), np.zeros(len(node), dtype=np.int64)
    above = mark(snapshot.subtree_end, folded)
    nearest = mark(snapshot.subtree_end, cut).nearest(node)
    first = np.where(nearest >= 0, above.above[nearest], 0)
    count = above.above[node] - first
    indptr = np.concatenate(([0], np.cumsum(count + 1)))
    row = np.repeat(np.arange(len(node)), count)
    number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    segments = np.zeros(indptr[-1], dtype=np.int64)
    segments[indptr[row] + number] = above.ancestor(node[row], first[row] + number)
    return indptr, segments
