"""Block-sparse rows: which queries read which KV.

After FlashInfer (section 3.1): a BSR matrix has groups of queries as rows and blocks of KV as columns, and attention
over a tree is a sum of such matrices.  Here a row's columns are slices of tree nodes, and each slice denotes the page
blocks it covers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.paths.heavy_paths import Parts, shared_parts
from prefixkit.attention.paths.kv_lists import KVLists, kv_lists
from prefixkit.attention.paths.runs import Runs, runs_of
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CostModel, HeadShape, decide_sharing
from prefixkit.attention.visible import ALL, Visible, lowest_positions
from prefixkit.tree.arrays import Ints, Longs, ranges

# As a segment's end: up to the node's length when the plan runs.  A leaf can grow while a plan is in use.
OPEN = 2**31 - 1


class MaskKind:
    """Which tokens of its KV list, the segments laid end to end, the queries of a BSR row see.

    Plain numbers, for numpy takes five times as long to compare an array with a member of an IntEnum.
    """

    ALL = 0  # every token
    # Tokens up to the query's own position, or up to its reach if a variant looks ahead; the list ends with the
    # queries' node.
    OWN = 1
    # Tokens up to the position that is the query's limit; the positions of the list are consecutive.
    LIMIT = 2


def no_ints() -> Ints:
    """An empty array."""
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class BSR:
    """Block-sparse rows (BSR rows).

    Attributes:
        q_begin, q_end: ``[rows]`` the contiguous query rows of each BSR row.
        kind: ``[rows]`` the :class:`MaskKind` of each row.
        indptr: ``[rows + 1]`` bounds of each BSR row's segments.
        node, begin, end: ``[segments]`` tokens ``[begin, end)`` of ``node``; ``end`` may be :data:`OPEN`, but not in a
            row of kind LIMIT.
        first, last: ``[rows]`` the positions of the first and the last token of each list at its current length.
        limit: ``[query rows of LIMIT rows]`` the position of the last token that each query sees, row after row;
            ascending within a row.
        seen_from: ``[query rows of LIMIT rows]`` the position of the first token that each query sees; empty if every
            query sees its row's list from the first token.
        skip: ``[rows]`` tokens at the beginning of each list that the tiles of OWN rows skip; empty if none do.
        runs: Runs, numbered after the tree's nodes, that segments may refer to; None if none does.
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

    Every shared node makes a shared-prefix row: all queries below the node read all its tokens.  Every node with query
    rows makes an own-node row, which is causal.  The tokens of an unshared node join the first rows below the node.

    With ``paths`` consecutive shared nodes of a heavy path make one row, of kind LIMIT unless all queries below the
    first node see all of them.  Nodes that are also consecutive in memory are read as slices of a run.

    ``shape`` and ``cost`` decide which nodes are shared, unless ``shared [nodes]`` says so, for measurements and tests.
    :meth:`StepTree.check` says what the tree must satisfy.  A BSR row reads nothing before the first position that some
    query of the row sees under ``visible``; the caller must mask queries that see less.

    Returns:
        The rows in the order of their nodes; a node's shared-prefix row comes before its own-node row.
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
    """:func:`decompose` for a tree that may be trimmed (:func:`trimmed`): a node may have fewer tokens than query rows.

    ``runs`` are the tree's runs, if any, which segments may be slices of; only with ``paths``.  ``tiles`` is for
    planners that do not cut lists: lists stay whole, but a tile begins at the first position that one of its queries
    sees under ``tiles``; the tiles of an own-node row begin no later than the node.  All shared-prefix rows are then of
    kind LIMIT.
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
    """The rows of a :class:`BSR`, with KV lists by positions instead of segments."""

    q_begin: Ints
    q_end: Ints
    kind: Ints
    lists: KVLists
    limit: Ints
    seen_from: Ints = field(default_factory=no_ints)
    skip: Ints = field(default_factory=no_ints)
    until: int | None = None

    def seen(self, tree: StepTree, visible: Visible) -> _Rows:
        """The rows without tokens that none of their queries sees, and without rows that have no visible
        token.  Own-node rows stay unless ranges end, because a leaf may grow into the visible range.
        """
        limited, until = self.kind == MaskKind.LIMIT, visible.until
        lowest = visible.begin(lowest_positions(tree.positions, self.q_begin, self.q_end))
        lists = self.lists.between(lowest, until)
        # With `until`, a query whose own-node row is dropped sees tokens in another row.
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
        """The same rows, with the positions at which their tiles begin: the first that one of their queries sees."""
        own = self.kind == MaskKind.OWN
        seen = visible.begin(tree.positions[self.q_begin])
        lists = self.lists
        before = np.add.reduceat(lists.high - lists.low, lists.indptr[:-1]) - (lists.high - lists.low)[lists.last]
        skip = np.where(own, np.clip(before + seen - lists.low[lists.last], 0, before), 0)
        seen_from = self.begins(tree, visible).astype(np.int32)
        return replace(self, seen_from=seen_from, skip=skip.astype(np.int32))

    def begins(self, tree: StepTree, visible: Visible) -> Longs:
        """For each query of each row of kind LIMIT, the first position of the row's list that it sees."""
        limited = self.kind == MaskKind.LIMIT
        queries = (self.q_end - self.q_begin)[limited]
        begin = visible.begin(tree.positions[ranges(self.q_begin[limited], queries)])
        first: Longs = np.maximum(begin, np.repeat(self.lists.first[limited], queries))
        return first

    def pack(self, tree: StepTree) -> BSR:
        """The rows with their lists as segments; the own node's segment ends OPEN, or at ``until``."""
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
    """``[rows]`` which shared-prefix rows are of kind LIMIT (with ``every`` all of them), and their limits, row by row.

    A query below a node of a part, but not below the part's next node, sees the part up to that node's end.  So does
    a query in the next node itself.
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
    begin = first_row[nodes + 1]  # the first query row below each node
    until = np.append(begin[1:], 0)
    until[np.cumsum(count) - 1] = first_row[snapshot.subtree_end[node[limited]]]
    return limited, np.repeat(snapshot.start[nodes] + snapshot.length[nodes] - 1, until - begin).astype(np.int32)
