"""One moment of a prefix tree, frozen into flat arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints


@dataclass(frozen=True, eq=False)
class TreeSnapshot:
    """A tree's nodes in depth-first (pre-)order; the empty root is left out, so a forest has several roots.

    Of a node's children the one with the most leaves comes last, the others in order of arrival.  Snapshots that no
    tree made may list them in any order.

    The subtree of node ``n`` is the contiguous range ``[n, subtree_end[n])``.  Token ``i`` of node ``n`` stands at
    position ``start[n] + i`` of its sequences, and its KV lies ``first_slot[n] + i`` slots into the node's pages
    ``pages[page_indptr[n]:page_indptr[n + 1]]``.  A leaf's pages may go
    on after its tokens: reserved pages.

    Attributes:
        version: The tree's structure version.  Two snapshots of one tree and equal version have the same nodes,
            parents, starts and order.  The later one may have a larger ``length`` and more ``pages`` in leaves that
            grew, never a smaller one; ``computed`` and the sequences may differ.
        page_size: Tokens per page.
        parent: ``[nodes]`` index of the parent, -1 for a root.
        subtree_end: ``[nodes]`` one past the last node of the subtree.
        start: ``[nodes]`` position of the node's first token.
        length: ``[nodes]`` tokens in the node.
        computed: ``[nodes]`` how many of them, from the first, have KV in the pool.
        first_slot: ``[nodes]`` offset of the first token in the node's first page.
        page_indptr: ``[nodes + 1]`` bounds of each node's pages in ``pages``.
        pages: page numbers, node after node.
        sequence_node: ``[sequences]`` the node at whose end each live sequence ends, ascending (depth-first order);
            -1 for an empty sequence.
        sequence_id: ``[sequences]`` the ids of those sequences.
        content: ``[nodes]`` numbers of what nodes hold: where two snapshots have the same number, the node's tokens and
            their KV are the same from its start on, as far as both have them.  None where that is not known.
        tree: Which tree, an object that stands for nothing else: equal to itself only, and in no other tree's
            snapshots as long as it is held.  A snapshot that no tree made is a tree of its own.
    """

    version: int
    page_size: int
    parent: Ints
    subtree_end: Ints
    start: Ints
    length: Ints
    computed: Ints
    first_slot: Ints
    page_indptr: Ints
    pages: Ints
    sequence_node: Ints
    sequence_id: NDArray[np.int64]
    content: NDArray[np.int64] | None = None
    tree: object = field(default_factory=object)

    def __repr__(self) -> str:
        return f"TreeSnapshot({self.num_nodes} nodes, {len(self.sequence_id)} sequences, page_size={self.page_size})"

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_tokens(self) -> int:
        """Distinct tokens held: what a tree stores once."""
        return int(self.length.sum())

    @property
    def num_tokens_unshared(self) -> int:
        """The sum of the sequences' lengths: what they would hold without sharing."""
        ends = self.sequence_node[self.sequence_node >= 0]  # empty sequences end at no node
        return int((self.start[ends] + self.length[ends]).sum(dtype=int))

    def depth(self) -> Ints:
        """``[nodes]`` how many nodes lie above each; 0 for a root."""
        opened = np.arange(self.num_nodes, dtype=np.int32)  # nodes before it in depth-first order ...
        closed = np.cumsum(np.bincount(self.subtree_end, minlength=self.num_nodes + 1))  # ... less those that ended
        return (opened - closed[: self.num_nodes]).astype(np.int32)

    def shared_by(self) -> Ints:
        """``[nodes]`` how many sequences hold each node's tokens: those that end in its subtree."""
        nodes = np.arange(self.num_nodes)
        before = np.searchsorted(self.sequence_node, nodes)
        return (np.searchsorted(self.sequence_node, self.subtree_end) - before).astype(np.int32)

    def slots(self, node: NDArray[np.integer], offset: NDArray[np.integer]) -> NDArray[np.int64]:
        """Pool slots of tokens ``offset[i]`` of nodes ``node[i]``; the arrays broadcast."""
        within = self.first_slot[node].astype(np.int64) + offset
        page = self.pages[self.page_indptr[node] + within // self.page_size].astype(np.int64)
        slots: NDArray[np.int64] = page * self.page_size + within % self.page_size
        return slots
