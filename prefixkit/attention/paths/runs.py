"""Runs: nodes of one path whose KV is consecutive in memory, joined into one node.

A kernel reads each segment of a KV list by itself, so segments of one token are slow.  If the slots of a path's inner
nodes are consecutive, as they are for nodes that a search leaves, one segment is a slice of all these nodes.  Inner
nodes do not grow, so a run is valid until the tree's structure changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.paths.heavy_paths import continues_path, path_order
from prefixkit.tree.arrays import Ints, indptr_of, ranges
from prefixkit.tree.snapshot import TreeSnapshot


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of a tree, numbered after its nodes: run ``r`` of a tree with ``n`` nodes is node ``n + r``.

    Attributes:
        of: ``[nodes]`` the run that each node of the tree is part of, -1 if none.
        start, length, first_slot: ``[runs]`` as a snapshot's arrays of nodes.
        page_indptr: ``[runs + 1]`` bounds of each run's pages in ``pages``.
        pages: Page numbers, run after run.
    """

    of: Ints
    start: Ints
    length: Ints
    first_slot: Ints
    page_indptr: Ints
    pages: Ints

    def __len__(self) -> int:
        return len(self.start)

    def goes_on(self, parent: Ints) -> NDArray[np.bool_]:
        """``[nodes]`` True for nodes that follow their parent in a run."""
        follows: NDArray[np.bool_] = (self.of >= 0) & (parent >= 0) & (self.of == self.of[parent])
        return follows


def with_runs(arrays: tuple[Ints, ...], runs: Runs | None) -> tuple[Ints, ...]:
    """``StepTree.arrays()`` with the runs appended to the nodes."""
    if runs is None:
        return arrays
    start, length, page_indptr, pages, first_slot = arrays
    return (
        np.concatenate((start, runs.start)),
        np.concatenate((length, runs.length)),
        np.concatenate((page_indptr, page_indptr[-1] + runs.page_indptr[1:])),
        np.concatenate((pages, runs.pages)),
        np.concatenate((first_slot, runs.first_slot)),
    )


def with_run_lengths(length: Ints, runs: Runs | None) -> Ints:
    """``[nodes + runs]`` tokens of each node, then of each run."""
    return length if runs is None else np.concatenate((length, runs.length))


def adjacent_to_parent(snapshot: TreeSnapshot) -> NDArray[np.bool_]:
    """``[nodes]`` True for inner nodes that continue their parent's path, from the slot after its last one."""
    length, size, nodes = snapshot.length, snapshot.page_size, np.arange(snapshot.num_nodes)
    adjacent = np.zeros(len(nodes), dtype=bool)
    goes_on = continues_path(snapshot) & (snapshot.subtree_end > nodes + 1) & (length > 0)
    below = np.flatnonzero(goes_on & (length[snapshot.parent] > 0))
    if not len(below):
        return adjacent
    above = snapshot.parent[below]
    end = snapshot.first_slot[above] + length[above]
    last_page = snapshot.pages[snapshot.page_indptr[above] + (end - 1) // size]
    first_page = snapshot.pages[snapshot.page_indptr[below] + snapshot.first_slot[below] // size]
    meets = end % size == snapshot.first_slot[below] % size
    meets &= snapshot.start[below] == snapshot.start[above] + length[above]  # not where tokens were trimmed
    adjacent[below] = meets & ((end % size == 0) | (last_page == first_page))
    return adjacent


def runs_of(snapshot: TreeSnapshot) -> Runs | None:
    """The runs of a tree: its longest chains of nodes in which each but the first is adjacent to its parent.

    Runs are in the order of paths (:func:`path_order`); None if no nodes are adjacent.
    """
    adjacent = adjacent_to_parent(snapshot)
    if not adjacent.any():
        return None
    order, size = path_order(snapshot), snapshot.page_size
    part = adjacent[order]
    part[:-1] |= part[1:]  # the node before the first adjacent one too
    nodes = order[part]
    begins = ~adjacent[nodes]
    first, run = np.flatnonzero(begins), np.cumsum(begins) - 1
    of = np.full(snapshot.num_nodes, -1, dtype=np.int32)
    of[nodes] = run
    slot, length = snapshot.first_slot[nodes], snapshot.length[nodes]
    page, last_page = slot // size, (slot + length - 1) // size
    held_before = slot % size > 0  # the previous node of the run holds the page too
    held_before[first] = False
    page += held_before
    pages = last_page - page + 1
    top = nodes[first]
    return Runs(
        of=of,
        start=snapshot.start[top],
        length=np.add.reduceat(length, first, dtype=np.int32),
        first_slot=snapshot.first_slot[top] % size,
        page_indptr=indptr_of(np.bincount(run, pages, len(first)).astype(np.int64)),
        pages=snapshot.pages[ranges(snapshot.page_indptr[nodes] + page, pages)],
    )
