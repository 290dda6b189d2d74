"""Block-sparse rows: which queries read which KV.

After FlashInfer (section 3.1): a BSR matrix has groups of queries as rows and blocks of KV as columns, and attention
over a tree is a sum of such matrices.  Here a row's columns are slices of tree nodes, and each slice stands for the
page blocks it covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.ancestry import mark
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CostModel, HeadShape, decide_sharing
from prefixkit.tree.arrays import Ints, Longs, ranges

# As a segment's end: up to the node's length at the time of the run.  A leaf can grow under a plan.
OPEN = 2**31 - 1


@dataclass(frozen=True, eq=False)
class BSR:
    """Block-sparse rows (BSR rows).

    Attributes:
        q_begin, q_end: ``[rows]`` the contiguous query rows of each BSR row.
        causal: ``[rows]`` True where a query sees only keys at its own position or before, else it sees them all.
        indptr: ``[rows + 1]`` bounds of each BSR row's segments.
        node, begin, end: ``[segments]`` tokens ``[begin, end)`` of ``node``; ``end`` may be :data:`OPEN`.
    """

    q_begin: Ints
    q_end: Ints
    causal: NDArray[np.bool_]
    indptr: Ints
    node: Ints
    begin: Ints
    end: Ints


def decompose(tree: StepTree, shape: HeadShape, cost: CostModel, shared: NDArray[np.bool_] | None = None) -> BSR:
    """Split attention over the tree into block-sparse rows, so that each query meets each visible token exactly once.

    Every shared node makes a shared-prefix row: all queries below it read all its tokens.  Every node with queries of
    its own makes an own-node row, which is causal.  The tokens of an unshared node join the first rows below it.

    ``shape`` and ``cost`` decide which nodes are shared, unless ``shared [nodes]`` says so, for measurements and tests.
    :meth:`StepTree.check` has what the tree must satisfy.

    Returns:
        The rows in the order of their nodes, a node's shared-prefix row before its own-node row.
    """
    tree.check()
    snapshot, below = tree.snapshot, tree.below
    if shared is None:
        shared = decide_sharing(tree, shape, cost)
    shared = shared & (below > 0)
    joining = ~shared & (below > 0) & (snapshot.length > 0)
    kinds = np.flatnonzero(np.stack((shared, tree.own_rows > 0), axis=1))
    node, causal = kinds >> 1, (kinds & 1).astype(bool)
    indptr, segments = _inherited(snapshot.subtree_end, shared, joining, node)
    length = snapshot.length
    segments[indptr[1:] - 1] = node
    end = length[segments]
    end[indptr[1:][causal] - 1] = OPEN
    return BSR(
        q_begin=tree.first_row[np.where(causal, node, node + 1)],
        q_end=tree.first_row[np.where(causal, node + 1, snapshot.subtree_end[node])],
        causal=causal,
        indptr=indptr.astype(np.int32),
        node=segments.astype(np.int32),
        begin=np.zeros(len(segments), dtype=np.int32),
        end=end,
    )


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
