"""Rows that append a token each to leaves of their own, step after step: the tree that they decode over."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.tree.ragged import indptr_of
from prefixkit.tree.snapshot import Ints, TreeSnapshot


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """What one decode step computes, and the pages that the steps after it will fill.

    Attributes:
        snapshot: A tree whose KV is complete but for the last token of each of the rows' leaves, which hold the pages
            of their tokens to come.  ``length`` counts the tokens of the step, ``computed`` those before.
        leaf: ``[rows]`` the node that each row appends to, ascending, each without children.
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
        """The batch without the leaves of all other rows; ``rows`` ascend.  It names no sequences."""
        old = self.snapshot
        stays = np.ones(old.num_nodes, dtype=bool)
        stays[self.leaf] = False
        stays[self.leaf[rows]] = True
        before = np.concatenate(([0], np.cumsum(stays))).astype(np.int32)  # nodes that stay, before each
        held = np.diff(old.page_indptr)
        snapshot = replace(
            old,
            tree=object(),  # no plan of the tree itself is one of these nodes
            parent=np.where(old.parent >= 0, before[old.parent], -1).astype(np.int32)[stays],
            subtree_end=before[old.subtree_end[stays]],
            page_indptr=indptr_of(held[stays]),
            pages=old.pages[np.repeat(stays, held)],
            start=old.start[stays],
            length=old.length[stays],
            computed=old.computed[stays],
            first_slot=old.first_slot[stays],
            sequence_node=old.sequence_node[:0],
            sequence_id=old.sequence_id[:0],
        )
        return DecodeBatch(snapshot, before[self.leaf[rows]])
