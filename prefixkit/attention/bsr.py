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

from prefixkit.attention.ancestry import mark
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CostModel, HeadShape, decide_sharing
from prefixkit.attention.visible import ALL, Visible
from prefixkit.tree.arrays import Ints, Longs, indptr_of, ranges

# As a segment's end: up to the node's length at the time of the run.  A leaf can grow under a plan.
OPEN = 2**31 - 1


class MaskKind(IntEnum):
    """What the queries of a BSR row see of its KV list, its segments laid end to end."""

    ALL = 0  # every token
    # Tokens at the query's own position or before, or up to its reach where a variant looks ahead: the list ends with
    # the queries' node.
    OWN = 1
    LIMIT = 2  # as many of the first tokens as the row's limit for the query says


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
        node, begin, end: ``[segments]`` tokens ``[begin, end)`` of ``node``; ``end`` may be :data:`OPEN`.
        limit: ``[query rows of LIMIT rows]`` tokens that each query sees, row after row.
    """

    q_begin: Ints
    q_end: Ints
    kind: Ints
    indptr: Ints
    node: Ints
    begin: Ints
    end: Ints
    limit: Ints = field(default_factory=no_ints)

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
) -> BSR:
    """Split attention over the tree into block-sparse rows, so that each query meets each visible token exactly once.

    Every shared node makes a shared-prefix row: all queries below it read all its tokens.  Every node with queries of
    its own makes an own-node row, which is causal.  The tokens of an unshared node join the first rows below it.

    ``shape`` and ``cost`` decide which nodes are shared, unless ``shared [nodes]`` says so, for measurements and tests.
    :meth:`StepTree.check` has what the tree must satisfy.  A BSR row reads nothing before the first position that one
    of its queries sees by ``visible``; those of its queries that see less must be masked.

    Returns:
        The rows in the order of their nodes, a node's shared-prefix row before its own-node row.
    """
    tree.check()
    return decompose_unchecked(tree, shape, cost, shared, visible)


def decompose_unchecked(
    tree: StepTree,
    shape: HeadShape,
    cost: CostModel,
    shared: NDArray[np.bool_] | None = None,
    visible: Visible = ALL,
) -> BSR:
    """The same of a tree that may be cut (:func:`trimmed`): a node may have fewer tokens than query rows."""
    snapshot, below = tree.snapshot, tree.below
    if shared is None:
        shared = decide_sharing(tree, shape, cost, visible)
    shared = shared & (below > 0)
    joining = ~shared & (below > 0) & (snapshot.length > 0)
    kinds = np.flatnonzero(np.stack((shared, tree.own_rows > 0), axis=1))
    node, causal = kinds >> 1, (kinds & 1).astype(bool)
    indptr, segments = _inherited(snapshot.subtree_end, shared, joining, node)
    length = snapshot.length
    segments[indptr[1:] - 1] = node
    end = length[segments]
    end[indptr[1:][causal] - 1] = OPEN
    rows = BSR(
        q_begin=tree.first_row[np.where(causal, node, node + 1)],
        q_end=tree.first_row[np.where(causal, node + 1, snapshot.subtree_end[node])],
        kind=(kinds & 1).astype(np.int32),
        indptr=indptr.astype(np.int32),
        node=segments.astype(np.int32),
        begin=np.zeros(len(segments), dtype=np.int32),
        end=end,
    )
    return _trimmed(rows, tree, visible) if visible.limits else rows


def _trimmed(rows: BSR, tree: StepTree, visible: Visible) -> BSR:
    """The rows without what lies outside their visible ranges; a row that no query sees is left out, but for an
    own-node row, whose leaf may grow into sight.
    """
    start, length = tree.snapshot.start, tree.snapshot.length
    row = np.repeat(np.arange(len(rows.causal)), np.diff(rows.indptr))
    first = visible.begin(lowest_positions(tree.positions, rows.q_begin, rows.q_end))
    begin = np.clip(first[row] - start[rows.node], 0, length[rows.node]).astype(np.int32)
    end, grows = rows.end, rows.causal
    if visible.until is not None:  # each query sees some of these in another row, if not in its own
        end, grows = np.minimum(end, np.maximum(visible.until - start[rows.node], 0)), np.zeros_like(grows)
    seen = begin < np.minimum(end, length[rows.node])
    last = rows.indptr[1:] - 1
    # A row is of the node that comes last: that segment stays, whatever the node's length, while the row does.
    stays = np.logical_or.reduceat(seen, rows.indptr[:-1]) | grows
    seen[last] = stays
    count = np.bincount(row[seen], minlength=len(stays))[stays]
    return replace(
        rows,
        q_begin=rows.q_begin[stays],
        q_end=rows.q_end[stays],
        kind=rows.kind[stays],
        indptr=indptr_of(count),
        node=rows.node[seen],
        begin=begin[seen],
        end=end[seen],
    )


def lowest_positions(positions: NDArray[np.int64], q_begin: Ints, q_end: Ints) -> NDArray[np.int64]:
    """``[rows]`` the lowest of ``positions`` among the query rows ``[q_begin, q_end)``, none of which is empty."""
    bounds = np.stack((q_begin, q_end), axis=1).reshape(-1)
    padded = np.append(positions, positions[-1])  # reduceat wants every bound to be an index
    lowest: NDArray[np.int64] = np.minimum.reduceat(padded, bounds)[::2]
    return lowest


def _inherited(
    subtree_end: Ints, shared: NDArray[np.bool_], joining: NDArray[np.bool_], node: Longs
) -> tuple[Longs, Longs]:
    """Bounds of each BSR row's segments, and their nodes: ancestors that join it, root first, then one left empty."""
    if not joining.any():
        return np.arange(len(node) + 1), np.zeros(len(node), dtype=np.int64)
    above = mark(subtree_end, joining)
    nearest = mark(subtree_end, shared).nearest(node)
    first = np.where(nearest >= 0, above.above[nearest], 0)
    count = above.above[node] - first
    indptr = np.concatenate(([0], np.cumsum(count + 1)))
    row = np.repeat(np.arange(len(node)), count)
    rank = ranges(first, count)
    segments = np.zeros(indptr[-1], dtype=np.int64)
    segments[indptr[row] + rank - first[row]] = above.ancestor(node[row], rank)
    return indptr, segments
