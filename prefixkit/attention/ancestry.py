"""Marked ancestors of many nodes at once: how many, and which.

A snapshot's nodes are in depth-first order, so a node's ancestors are the nodes whose subtrees contain it.  The number
of marked ancestors is a prefix sum: marked subtrees that have begun less those that have ended.  The marked ancestor of
a given rank is the last marked node of that rank before the node.  There is no loop over nodes or levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints, Longs


@dataclass(frozen=True, eq=False)
class Marked:
    """The marked nodes of a tree, as ancestors of other nodes.

    Attributes:
        above: ``[nodes]`` how many proper ancestors of each node are marked.
    """

    above: Longs
    _nodes: Longs
    _keys: Longs

    def ancestor(self, node: NDArray[np.integer], rank: NDArray[np.integer]) -> Longs:
        """For each ``node``, the marked proper ancestor that has ``rank`` marked ancestors itself; it must exist."""
        # The last marked node of that rank before `node`: any later one would begin after this one's subtree ended.
        index = np.searchsorted(self._keys, rank * len(self.above) + node) - 1
        ancestors: Longs = self._nodes[index]
        return ancestors

    def nearest(self, node: NDArray[np.integer]) -> Longs:
        """The nearest marked proper ancestor of each ``node``, -1 if there is none."""
        rank = self.above[node]
        if not len(self._nodes):
            return np.full(len(rank), -1)
        return np.where(rank > 0, self.ancestor(node, rank - 1), -1)


def mark(subtree_end: Ints, marked: NDArray[np.bool_]) -> Marked:
    """Index the nodes where ``marked`` is True."""
    count, nodes, above = len(subtree_end), np.flatnonzero(marked), marked_above(subtree_end, marked)
    order = np.argsort(above[nodes], kind="stable")
    return Marked(above, nodes[order], above[nodes[order]] * count + nodes[order])


def marked_above(subtree_end: Ints, marked: NDArray[np.bool_]) -> Longs:
    """``[nodes]`` how many proper ancestors of each node are ``marked``."""
    count = len(subtree_end)
    closed = np.bincount(subtree_end[marked], minlength=count + 1)[:count]
    above: Longs = np.cumsum(marked - closed) - marked
    return above
