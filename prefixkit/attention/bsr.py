"""Block-sparse rows: which queries read which KV.

After FlashInfer (section 3.1): a BSR matrix has groups of queries as rows and blocks of KV as columns, and attention
over a tree is a sum of such matrices.  Here a row's columns are slices of tree nodes, and each slice stands for the
page blocks it covers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.paths.heavy_paths import Parts, shared_parts
from prefixkit.attention.paths.kv_lists import KVLists, kv_lists
from prefixkit.attention.paths.runs import Runs, runs_of
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CostModel, HeadShape, decide_sharing
from prefixkit.attention.visible import ALL, Visible, lowest_positions
from prefixkit.tree.arrays import Ints, Longs, ranges

# As a segment's end: up to the node's length at the time of the run.  A leaf can grow under a plan.
OPEN = 2**31 - 1


class MaskKind(IntEnum):
    """What the queries of a BSR row see of its KV list, its segments laid end to end."""

    ALL = 0  # every token
    # Tokens at the query's own position or before, or up to its reach where a variant looks ahead: the list ends with
    # the queries' node.
    OWN = 1
    LIMIT = (
        2  # tokens up to the position that the row's limit for the query says; positions of the list are consecutive
    )


def no_ints() -> Ints:
    """An empty array."""
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class BSR:
    """Block-sparse rows (BSR rows).

    Attributes:
        q_begin, q_end: ``[rows]`` the contiguous query rows of each BSR row.
        kind: ``[rows]`` the :class:`MaskKind` of each.
        indptr: ``[rows + 1]`` bounds of each BSR row's segments.
        node, begin, end: ``[segments]`` tokens ``[begin, end)`` of ``node``; ``end`` may be :data:`OPEN`, but not in a
            row of kind LIMIT.
        first, last: ``[rows]`` the positions of the first and the last token of each list, as long as it is now.
        limit: ``[query rows of LIMIT rows]`` the position of the last token that each query sees, row after row;
            ascending within a row.
        seen_from: ``[query rows of LIMIT rows]`` the position of the first token that each query sees; empty where that
            is the first of its row's list.
        skip: ``[rows]`` tokens at the beginning of each list that its tiles skip, of rows of kind OWN; empty for none.
        runs: The nodes behind the tree's own that segments may name; None where none do.
    """

    q_begin: Ints
    q_end: Ints
    kind: Ints
    indptr: Ints
    node: Ints
    begin: Ints
    end: Ints
    first: Ints
    last: Ints
    limit: Ints = field(default_factory=no_ints)
    seen_from: Ints = field(default_factory=no_ints)
    skip: Ints = field(default_factory=no_ints)
    runs: Runs | None = None

    @property
    def causal(self) -> NDArray[np.bool_]:
        """``[rows]`` True for rows of kind OWN."""
        own: NDArray[np.bool_] = self.kind == MaskKind.OWN
        return own


def decompose(
    tree: StepTree,
    shape: HeadShape,
    cost: CostModel,
    shared: NDArray[np.bool_] | None = None,
    visible: Visible = ALL,
    *,
    paths: bool = False,
) -> BSR:
    """Split attention over the tree into block-sparse rows, so that each query meets each visible token exactly once.

    Every shared node makes a shared-prefix row: all queries below it read all its tokens.  Every node with queries of
    its own makes an own-node row, which is causal.  The tokens of an unshared node join the first rows below it.

    With ``paths`` shared nodes that follow each other on a heavy path make one row, of kind LIMIT unless all queries
    below the first of them see them all; and nodes that follow each other in memory too are read as slices of a run.

    ``shape`` and ``cost`` decide which nodes are shared, unless ``shared [nodes]`` says so, for measurements and tests.
    :meth:`StepTree.check` has what the tree must satisfy.  A BSR row reads nothing before the first position that one
    of its queries sees by ``visible``; those of its queries that see less must be masked.

    Returns:
        The rows in the order of their nodes, a node's shared-prefix row before its own-node row.
    """
    tree.check()
    runs = runs_of(tree.snapshot) if paths else None
    return decompose_unchecked(tree, shape, cost, shared, visible, paths=paths, runs=runs)


def decompose_unchecked(
    tree: StepTree,
    shape: HeadShape,
    cost: CostModel,
    shared: NDArray[np.bool_] | None = None,
    visible: Visible = ALL,
    *,
    paths: bool = False,
    runs: Runs | None = None,
    tiles: Visible = ALL,
) -> BSR:
    """The same of a tree that may be cut (:func:`trimmed`): a node may have fewer tokens than query rows.

    ``runs`` are those of the tree, if any, of which segments may be slices; with ``paths`` only.  By ``tiles`` lists
    stay whole, but tiles begin where one of their queries sees, those of an own-node row with the node at the latest:
    for planners that cut no lists.  All shared-prefix rows are of kind LIMIT then.
    """
    snapshot, below = tree.snapshot, tree.below
    if shared is None:
        shared = decide_sharing(tree, shape, cost, visible, paths=paths)
    shared = shared & (below > 0)
    parts = shared_parts(snapshot, shared, paths=paths)
    rows = np.flatnonzero(np.stack((parts.heads, tree.own_rows > 0), axis=1))
    node, causal = rows >> 1, (rows & 1).astype(bool)
    limited, limit = _limits(tree, parts, node, causal, every=tiles.limits)
    found = _Rows(
        q_begin=tree.first_row[np.where(causal, node, node + 1)],
        q_end=tree.first_row[np.where(causal, node + 1, snapshot.subtree_end[node])],
        kind=np.where(limited, MaskKind.LIMIT, causal).astype(np.int32),
        lists=kv_lists(tree, shared, parts, node, causal, runs),
        limit=limit,
    )
    if tiles.limits:
        found = found.from_where_seen(tree, tiles)
    return (found.seen(tree, visible) if visible.limits else found).pack(tree)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows as :class:`BSR` has them, with KV lists by positions."""

    q_begin: Ints
    q_end: Ints
    kind: Ints
    lists: KVLists
    limit: Ints
    seen_from: Ints = field(default_factory=no_ints)
    skip: Ints = field(default_factory=no_ints)
    until: int | None = None

    def seen(self, tree: StepTree, visible: Visible) -> _Rows:
        """Without what lies outside all their queries' visible ranges, and without rows that none sees, except for an
        own-node row, whose leaf may grow into sight.
        """
        limited, until = self.kind == MaskKind.LIMIT, visible.until
        lowest = visible.begin(lowest_positions(tree.positions, self.q_begin, self.q_end))
        lists = self.lists.between(lowest, until)
        # Where ranges end, each query sees some of these in another row, if not in its own.
        stays = lists.holds | ((self.kind == MaskKind.OWN) & (until is None))
        of = np.repeat(np.flatnonzero(limited), (self.q_end - self.q_begin)[limited])
        begin = replace(self, lists=lists).begins(tree, visible)
        limit = self.limit if until is None else np.minimum(self.limit, np.int32(until - 1))
        stays[limited] &= np.bincount(of[begin <= limit], minlength=len(stays))[limited] > 0
        return _Rows(
            q_begin=self.q_begin[stays],
            q_end=self.q_end[stays],
            kind=self.kind[stays],
            lists=lists.only(stays),
            limit=limit[stays[of]],
            seen_from=begin[stays[of]].astype(np.int32),
            until=until,
        )

    def from_where_seen(self, tree: StepTree, visible: Visible) -> _Rows:
        """The same rows, whose tiles begin where one of their queries sees."""
        own = self.kind == MaskKind.OWN
        seen = visible.begin(tree.positions[self.q_begin])
        lists = self.lists
        before = np.add.reduceat(lists.high - lists.low, lists.indptr[:-1]) - (lists.high - lists.low)[lists.last]
        skip = np.where(own, np.clip(before + seen - lists.low[lists.last], 0, before), 0)
        seen_from = self.begins(tree, visible).astype(np.int32)
        return replace(self, seen_from=seen_from, skip=skip.astype(np.int32))

    def begins(self, tree: StepTree, visible: Visible) -> Longs:
        """The first position of its list that each query of a row of kind LIMIT sees, row after row."""
        limited = self.kind == MaskKind.LIMIT
        queries = (self.q_end - self.q_begin)[limited]
        begin = visible.begin(tree.positions[ranges(self.q_begin[limited], queries)])
        first: Longs = np.maximum(begin, np.repeat(self.lists.first[limited], queries))
        return first

    def pack(self, tree: StepTree) -> BSR:
        """The rows with their lists as segments; own nodes are open at their ends, as far as queries see."""
        lists = self.lists
        node, begin, end = lists.segments(tree)
        own = lists.last[self.kind == MaskKind.OWN]
        end[own] = OPEN if self.until is None else np.maximum(self.until - tree.snapshot.start[node[own]], begin[own])
        return BSR(
            q_begin=self.q_begin,
            q_end=self.q_end,
            kind=self.kind,
            indptr=lists.indptr.astype(np.int32),
            node=node.astype(np.int32),
            begin=begin.astype(np.int32),
            end=end.astype(np.int32),
            first=lists.first.astype(np.int32),
            last=(lists.high[lists.last] - 1).astype(np.int32),
            limit=self.limit,
            seen_from=self.seen_from,
            skip=self.skip,
            runs=lists.runs,
        )


def _limits(
    tree: StepTree, parts: Parts, node: Longs, causal: NDArray[np.bool_], *, every: bool
) -> tuple[NDArray[np.bool_], Ints]:
    """``[rows]`` which shared-prefix rows are of kind LIMIT, or ``every`` one, and the limits of all, row after row.

    A query below a node of a part, and not below the next one, sees the part up to that node's end; also where its own
    node is the next one.
    """
    limited = np.zeros(len(node), dtype=bool)
    if not every and len(parts.nodes) == len(parts.bounds) - 1:  # each part is one node
        return limited, no_ints()
    snapshot, first_row = tree.snapshot, tree.first_row
    last = parts.last(node[~causal])
    limited[~causal] = every | (first_row[last + 1] > first_row[node[~causal] + 1])
    nodes, count = parts.of(node[limited])
    if not len(nodes):
        return limited, no_ints()
    begin = first_row[nodes + 1]  # of the queries that leave below each
    until = np.append(begin[1:], 0)
    until[np.cumsum(count) - 1] = first_row[snapshot.subtree_end[node[limited]]]
    return limited, np.repeat(snapshot.start[nodes] + snapshot.length[nodes] - 1, until - begin).astype(np.int32)
