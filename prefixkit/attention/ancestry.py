"""Questions about marked ancestors, answered for many nodes at once.

A snapshot's nodes are in depth-first order, so a node's ancestors are the subtrees open at it.  Counting those that
were opened and not yet closed is a prefix sum; the marked ancestor of a given rank is the last marked node of that rank
before it.  No loop over nodes or levels, whatever the tree's shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints, Longs


@dataclass(frozen=True, eq=False)
class Marked:
    """Some nodes of a tree, as ancestors of others.

    Attributes:
        above: ``[nodes]`` how many marked nodes are proper ancestors of each.
    """

    above: Longs
    _nodes: Longs
    _keys: Longs

    def ancestor(self, node: NDArray[np.integer], rank: NDArray[np.integer]) -> Longs:
        """The marked proper ancestor of each ``node`` that has ``rank`` marked ones above itself; it must exist."""
        # The last node of that rank before ours: a later one in between would have ended its subtree.
        index = np.searchsorted(self._keys, rank * len(self.above) + node) - 1
        ancestors: Longs = self._nodes[index]
        return ancestors

    def nearest(self, node: NDArray[np.integer]) -> Longs:
        """The nearest marked proper ancestor of each ``node``, or -1."""
        rank = self.above[node]
        if not len(self._nodes):
            return np.full(len(rank), -1)
        return np.where(rank > 0, self.ancestor(node, rank - 1), -1)


def mark(subtree_end: Ints, marked: NDArray[np.bool_]) -> Marked:
    """Prepare the answers for the nodes where ``marked`` is True."""
    count = len(subtree_end)
    nodes = np.flatnonzero(marked)
    closed = np.cumsum(np.bincount(subtree_end[nodes], minlength=count + 1))[:count]
    above = np.cumsum(marked) - marked - closed
    order = np.argsort(above[nodes], kind="stable")
    return Marked(above, nodes[order], above[nodes[order]] * count + nodes[order])
