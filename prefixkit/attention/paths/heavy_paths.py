"""Heavy paths of a tree: from a node down to a leaf, always to the child that is listed last.

A snapshot lists the heaviest child of a node last (``tree/freeze.py``), so a path follows the most sequences, and a
sequence meets at most ``1 + log2(sequences)`` paths (Sleator and Tarjan, A data structure for dynamic trees, section
3).  If children are in another order, all of this holds except for that bound.  The nodes below a node of a path are
consecutive, in ascending order of the depth at which they leave the path: each sees a prefix of the path, never a
shorter one than the nodes before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Longs, ranges
from prefixkit.tree.snapshot import TreeSnapshot


def path_order(snapshot: TreeSnapshot) -> Longs:
    """``[nodes]`` all nodes, path after path, each from the top down; those of a path have the same ``subtree_end``."""
    order: Longs = np.argsort(snapshot.subtree_end, kind="stable")
    return order


def continues_path(snapshot: TreeSnapshot) -> NDArray[np.bool_]:
    """``[nodes]`` whether each node continues its parent's path."""
    end, parent = snapshot.subtree_end, snapshot.parent
    goes_on: NDArray[np.bool_] = (parent >= 0) & (end == end[parent])
    return goes_on


def meets_parent(snapshot: TreeSnapshot) -> NDArray[np.bool_]:
    """``[nodes]`` whether each node begins at the position where its parent ends.

    A part ends where tokens are missing, so that its positions are consecutive.
    """
    meets: NDArray[np.bool_] = snapshot.start == snapshot.start[snapshot.parent] + snapshot.length[snapshot.parent]
    return meets


@dataclass(frozen=True, eq=False)
class Parts:
    """Shared parts of paths: nodes below one another, which all queries below the first node read as one list.

    Attributes:
        heads: ``[nodes]`` True for the first node of each part.
        nodes: ``[nodes of parts]`` part after part, each from the top down.
        bounds: ``[parts + 1]`` bounds of each part in ``nodes``.
        number: ``[nodes]`` the part that each node is the head of.
    """

    heads: NDArray[np.bool_]
    nodes: Longs
    bounds: Longs
    number: Longs

    def of(self, head: Longs) -> tuple[Longs, Longs]:
        """The nodes of the parts with these heads, part after part, and how many each has."""
        number = self.number[head]
        count = self.bounds[number + 1] - self.bounds[number]
        return self.nodes[ranges(self.bounds[number], count)], count

    def last(self, head: Longs) -> Longs:
        """The last node of the part of each head."""
        return self.nodes[self.bounds[self.number[head] + 1] - 1]


def shared_parts(snapshot: TreeSnapshot, shared: NDArray[np.bool_], *, paths: bool) -> Parts:
    """The parts: the longest runs of consecutive shared nodes of each path; without ``paths`` each node is a part."""
    heads = shared
    nodes = np.flatnonzero(shared)
    if paths:
        heads = shared & ~(continues_path(snapshot) & meets_parent(snapshot) & shared[snapshot.parent])
        order = path_order(snapshot)
        nodes = order[shared[order]]
    first = np.flatnonzero(heads[nodes])
    number = np.zeros(len(shared), dtype=np.int64)
    number[nodes[first]] = np.arange(len(first))
    return Parts(heads, nodes, np.append(first, len(nodes)), number)
