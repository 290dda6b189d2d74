"""Rows that append a token each to leaves of their own, step after step: the tree that they decode over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count as count_up

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.tree.ragged import indptr_of, ranges
from prefixkit.tree.snapshot import Ints, TreeSnapshot

# Versions that no PrefixTree has: a plan made for a batch is never taken for its tree's, or another batch's.
_versions = count_up(-1, -1)


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """What one decode step computes, and the pages that the steps after it will fill.

    Attributes:
        snapshot: A tree whose leaves have the pages of their tokens to come behind those of their tokens.  ``length``
            counts the tokens of the step, ``computed`` those before.  It names no sequences.
        leaf: ``[rows]`` the node that each row appends to, ascending.
    """

    snapshot: TreeSnapshot
    leaf: Ints

    @property
    def num_rows(self) -> int:
        return len(self.leaf)

    @property
    def tree(self) -> StepTree:
        """The tree with one query row for each leaf: its last token."""
        end = self.snapshot.length[self.leaf]
        return StepTree(self.snapshot, Queries(self.leaf, end - 1, end))

    def grown(self, steps: int) -> DecodeBatch:
        """The batch ``steps`` steps later; leaves whose pages are full stay as they are."""
        tree = self.snapshot
        capacity = np.diff(tree.page_indptr)[self.leaf] * tree.page_size - tree.first_slot[self.leaf]
        length, computed = tree.length.copy(), tree.computed.copy()
        length[self.leaf] = np.minimum(length[self.leaf] + steps, capacity)
        computed[self.leaf] = np.minimum(computed[self.leaf] + steps, capacity)
        return replace(self, snapshot=replace(tree, length=length, computed=computed))

    def keep(self, rows: NDArray[np.intp]) -> DecodeBatch:
        """The batch without the leaves of all other rows; ``rows`` ascend."""
        old = self.snapshot
        stays = np.ones(old.num_nodes, dtype=bool)
        stays[self.leaf] = False
        stays[self.leaf[rows]] = True
        before = np.concatenate(([0], np.cumsum(stays))).astype(np.int32)  # nodes that stay, before each
        held = np.diff(old.page_indptr)
        snapshot = replace(
            old,
            version=next(_versions),
            parent=np.where(old.parent >= 0, before[old.parent], -1).astype(np.int32)[stays],
            subtree_end=before[old.subtree_end[stays]],
            page_indptr=indptr_of(held[stays]),
            pages=old.pages[np.repeat(stays, held)],
            start=old.start[stays],
            length=old.length[stays],
            computed=old.computed[stays],
            first_slot=old.first_slot[stays],
        )
        return DecodeBatch(snapshot, before[self.leaf[rows]])


def decode_batch(snapshot: TreeSnapshot, leaf: Ints, pages: Sequence[Ints]) -> DecodeBatch:
    """A batch over a tree whose KV is complete but for the last token of each of the rows' leaves.

    Args:
        snapshot: The tree.
        leaf: ``[rows]`` the nodes, ascending, each without children.
        pages: For each the pages that it will come to need.
    """
    held, more = np.diff(snapshot.page_indptr), np.array([len(one) for one in pages], np.int32)
    counts = held.copy()
    counts[leaf] += more
    indptr = indptr_of(counts)
    merged = np.empty(indptr[-1], np.int32)
    behind = np.zeros(len(merged), dtype=bool)  # where the new ones go
    behind[ranges(indptr[leaf] + held[leaf], more)] = True
    merged[~behind] = snapshot.pages
    merged[behind] = np.concatenate(pages) if len(pages) else merged[:0]
    snapshot = replace(
        snapshot,
        version=next(_versions),
        page_indptr=indptr,
        pages=merged,
        sequence_node=snapshot.sequence_node[:0],
        sequence_id=snapshot.sequence_id[:0],
    )
    return DecodeBatch(snapshot, leaf)
