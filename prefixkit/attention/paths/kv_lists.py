"""The KV lists of block-sparse rows: which tokens each row reads, as slices of nodes, root first.

A list holds the tokens of consecutive positions: from the end of the nearest shared node above the row, or from the
root, to the end of the row's own node or of its part of a path.  It consists of pieces: each is one node, or several
nodes of one path that are adjacent in memory.  All pieces of all rows are found at once, by ranks among ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.ancestry import mark
from prefixkit.attention.paths.heavy_paths import Parts
from prefixkit.attention.paths.runs import Runs
from prefixkit.attention.queries import StepTree
from prefixkit.tree.arrays import Longs, ranges


@dataclass(frozen=True, eq=False)
class KVLists:
    """Lists of pieces, laid end to end.

    Attributes:
        indptr: ``[lists + 1]`` bounds of each list's pieces; each list has a piece.
        node: ``[pieces]`` the first node of each piece.
        low, high: ``[pieces]`` the positions of each piece's tokens, ``[low, high)``.
        runs: The runs that some pieces are slices of; None if each piece is one node.
    """

    indptr: Longs
    node: Longs
    low: Longs
    high: Longs
    runs: Runs | None

    @property
    def last(self) -> Longs:
        """``[lists]`` the last piece of each."""
        return self.indptr[1:] - 1

    @property
    def first(self) -> Longs:
        """``[lists]`` the position of the first token of each."""
        return self.low[self.indptr[:-1]]

    @property
    def holds(self) -> NDArray[np.bool_]:
        """``[lists]`` whether each has tokens."""
        holds: NDArray[np.bool_] = np.logical_or.reduceat(self.low < self.high, self.indptr[:-1])
        return holds

    def between(self, first: Longs, until: int | None) -> KVLists:
        """The lists restricted to positions from ``first [lists]`` on, and before ``until``."""
        low = np.maximum(self.low, np.minimum(np.repeat(first, np.diff(self.indptr)), self.high))
        high = self.high if until is None else np.maximum(np.minimum(self.high, until), low)
        return replace(self, low=low, high=high)

    def only(self, stays: NDArray[np.bool_]) -> KVLists:
        """The lists where ``stays`` is True, without empty pieces, except for each list's last piece."""
        of = np.repeat(np.arange(len(stays)), np.diff(self.indptr))
        seen = (self.low < self.high) & stays[of]
        seen[self.last] = stays
        indptr = np.concatenate(([0], np.cumsum(np.bincount(of[seen], minlength=len(stays))[stays])))
        return replace(self, indptr=indptr, node=self.node[seen], low=self.low[seen], high=self.high[seen])

    def segments(self, tree: StepTree) -> tuple[Longs, Longs, Longs]:
        """The node or run of each piece, and its begin and end in tokens of that node or run."""
        start = tree.snapshot.start
        node, begin, end = self.node, self.low - start[self.node], self.high - start[self.node]
        several = np.flatnonzero(end > tree.snapshot.length[node])
        if self.runs is not None and len(several):
            which = self.runs.of[node[several]]
            node = node.copy()
            node[several] = tree.snapshot.num_nodes + which
            begin[several] = self.low[several] - self.runs.start[which]
            end[several] = self.high[several] - self.runs.start[which]
        return node, begin, end


def kv_lists(
    tree: StepTree, shared: NDArray[np.bool_], parts: Parts, node: Longs, own: NDArray[np.bool_], runs: Runs | None
) -> KVLists:
    """The lists of rows: an ``own`` row's list ends with ``node``, another row's with the part whose head is ``node``.

    Ancestors below the nearest shared one join a row.  Consecutive nodes of one of ``runs`` are one piece.
    """
    snapshot = tree.snapshot
    length, parent = snapshot.length, snapshot.parent
    adjacent = np.zeros(snapshot.num_nodes, dtype=bool) if runs is None else runs.goes_on(parent)
    joins = ~shared & (tree.below > 0) & (length > 0)
    inherited, above = _inherited(snapshot.subtree_end, shared, joins & ~(adjacent & joins[parent]), node)
    own_count, own_nodes, own_last = _own(parts, adjacent, length > 0, node, own)
    indptr = np.concatenate(([0], np.cumsum(inherited + own_count)))
    pieces, last = np.empty((2, indptr[-1]), dtype=np.int64)
    above_at, own_at = ranges(indptr[:-1], inherited), ranges(indptr[:-1] + inherited, own_count)
    pieces[above_at], pieces[own_at], last[own_at] = above, own_nodes, own_last
    last[above_at] = above
    if adjacent.any():  # a piece extends down to the nearest joining ancestor of the next piece
        following = pieces[above_at + 1]
        following[np.cumsum(inherited)[inherited > 0] - 1] = node[inherited > 0]
        last[above_at] = mark(snapshot.subtree_end, joins).nearest(following)
    start = snapshot.start.astype(np.int64)
    lists = KVLists(
        indptr=indptr,
        node=pieces,
        low=start[pieces],
        high=(start + length)[last],
        runs=runs,
    )
    empty = lists.low >= lists.high
    empty[lists.last] = False
    return lists.only(np.ones(len(node), dtype=bool)) if empty.any() else lists


def _inherited(
    subtree_end: NDArray[np.int32], shared: NDArray[np.bool_], begins: NDArray[np.bool_], node: Longs
) -> tuple[Longs, Longs]:
    """How many pieces each row inherits from ancestors that join it, and the first node of each piece, root first."""
    if not begins.any():
        return np.zeros(len(node), dtype=np.int64), np.zeros(0, dtype=np.int64)
    above = mark(subtree_end, begins)
    nearest = mark(subtree_end, shared).nearest(node)
    first = np.where(nearest >= 0, above.above[nearest], 0)
    count = above.above[node] - first
    return count, above.ancestor(np.repeat(node, count), ranges(first, count))


def _own(
    parts: Parts, adjacent: NDArray[np.bool_], holds: NDArray[np.bool_], node: Longs, own: NDArray[np.bool_]
) -> tuple[Longs, Longs, Longs]:
    """How many own pieces each row has, and the first and last node of each; ``holds``: whether nodes have tokens."""
    if len(parts.nodes) == len(parts.bounds) - 1:  # each part is one node
        return np.ones(len(node), dtype=np.int64), node, node
    breaks = parts.heads[parts.nodes] | ~adjacent[parts.nodes]
    begins = np.flatnonzero(breaks & (parts.heads | holds)[parts.nodes])
    ends = np.append(np.flatnonzero(breaks)[1:], len(breaks))[np.cumsum(breaks)[begins] - 1] - 1
    before = np.searchsorted(begins, parts.bounds)  # pieces of the parts before each
    number = parts.number[node]
    count = np.where(own, 1, before[number + 1] - before[number])
    first, last = np.repeat(node, count), np.repeat(node, count)
    shared = np.repeat(~own, count)
    listed = ranges(before[number[~own]], count[~own])
    first[shared], last[shared] = parts.nodes[begins[listed]], parts.nodes[ends[listed]]
    return count, first, last
