"""Composable block-sparse rows: which queries read which KV, one format per tile class.

After FlashInfer (section 3.1): a BSR matrix has groups of queries as rows and blocks of KV as columns, and attention over a
tree is a sum of such matrices.  Here a row's columns are slices of tree nodes, and each slice stands for the page blocks
it covers (:func:`page_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.cost import CostModel, HeadShape, decide_sharing
from prefixkit.tree.snapshot import Ints, TreeSnapshot

# As a segment's end: up to the node's length at the time of the run.  A leaf can grow under a plan.
OPEN = 2**31 - 1

# Rows of a tile in query heads (queries x group): 8 and 16 are the matrix instructions' narrow shapes, 64 is one
# warpgroup, 128 two.
TILE_CLASSES = (8, 16, 64, 128)


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
    """Block-sparse rows of one tile class.

    Attributes:
        tile_rows: The class: query heads (queries x group) per tile.
        q_begin, q_end: ``[rows]`` the contiguous queries of each row.
        causal: ``[rows]`` True where a query sees only keys at its own position or before; False where it sees them all.
        indptr: ``[rows + 1]`` bounds of each row's segments.
        node, begin, end: ``[segments]`` tokens ``[begin, end)`` of ``node``; ``end`` may be :data:`OPEN`.
    """

    tile_rows: int
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


@dataclass(frozen=True)
class _Row:
    q_begin: int
    q_end: int
    causal: bool
    segments: list[tuple[int, int, int]]


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
) -> tuple[BSR, ...]:
    """Split attention over the tree into block-sparse rows, so that each query meets each visible token exactly once.

    Every shared node becomes a dense row: all queries below it read all its tokens.  Every node with queries of its own
    becomes a causal row.  The tokens of a node that is not shared join the first rows below it.

    Args:
        snapshot: The tree.
        queries: The step's query rows; see :func:`check_queries` for what they must satisfy.
        shape: The heads, for tile classes and cost.
        cost: Decides which nodes are shared.
        shared: ``[nodes]`` overrides that decision; for tests and studies.

    Returns:
        One BSR for each tile class that occurs, narrow tiles first.
    """
    check_queries(snapshot, queries)
    own = queries.rows_per_node(snapshot.num_nodes)
    row_of_node = np.concatenate(([0], np.cumsum(own))).astype(np.int32)
    below = row_of_node[snapshot.subtree_end] - row_of_node[1:]
    if shared is None:
        shared = decide_sharing(snapshot, own, below, shape, cost)
    by_class: dict[int, list[_Row]] = {}
    for row in _rows(snapshot, own.tolist(), below.tolist(), row_of_node.tolist(), shared.tolist()):
        by_class.setdefault(tile_class((row.q_end - row.q_begin) * shape.group), []).append(row)
    return tuple(_pack(tile_rows, by_class[tile_rows]) for tile_rows in sorted(by_class))


def tile_class(query_heads: int) -> int:
    """The smallest tile that holds so many rows, or the largest there is."""
    return next((tile for tile in TILE_CLASSES if query_heads <= tile), TILE_CLASSES[-1])


# Ancestors that folded, nearest first: a linked list, so that siblings share it and a deep chain costs no copies.
_Folded = tuple[int, "_Folded"] | None


def _rows(
    snapshot: TreeSnapshot, own: list[int], below: list[int], row_of_node: list[int], shared: list[bool]
) -> Iterator[_Row]:
    parent, length = snapshot.parent.tolist(), snapshot.length.tolist()
    handed_down: list[_Folded] = [None] * len(parent)
    for node in range(len(parent)):
        if not own[node] and not below[node]:
            continue
        inherited = handed_down[parent[node]] if parent[node] >= 0 else None
        own_begin, own_end = row_of_node[node], row_of_node[node + 1]
        if shared[node] and below[node]:
            yield _Row(own_end, own_end + below[node], False, [*_slices(inherited, length), (node, 0, length[node])])
        else:
            handed_down[node] = (node, inherited) if below[node] else None
        if own[node]:
            yield _Row(own_begin, own_end, True, [*_slices(inherited, length), (node, 0, OPEN)])


def _slices(folded: _Folded, length: list[int]) -> list[tuple[int, int, int]]:
    slices = []
    while folded is not None:
        node, folded = folded
        if length[node]:
            slices.append((node, 0, length[node]))
    return slices[::-1]


def _pack(tile_rows: int, rows: list[_Row]) -> BSR:
    segments = np.array([segment for row in rows for segment in row.segments], dtype=np.int32).reshape(-1, 3)
    return BSR(
        tile_rows=tile_rows,
        q_begin=np.array([row.q_begin for row in rows], dtype=np.int32),
        q_end=np.array([row.q_end for row in rows], dtype=np.int32),
        causal=np.array([row.causal for row in rows], dtype=bool),
        indptr=np.cumsum([0, *(len(row.segments) for row in rows)]).astype(np.int32),
        node=segments[:, 0],
        begin=segments[:, 1],
        end=segments[:, 2],
    )


def page_blocks(snapshot: TreeSnapshot, node: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The page blocks behind a slice of a node: ``(page, first, last)`` with tokens in slots ``[first, last)`` of the page."""
    size = snapshot.page_size
    slot, stop = int(snapshot.first_slot[node]) + begin, int(snapshot.first_slot[node]) + end
    while slot < stop:
        page = int(snapshot.pages[snapshot.page_indptr[node] + slot // size])
        upto = min(stop, (slot // size + 1) * size)
        yield page, slot % size, (upto - 1) % size + 1
        slot = upto
