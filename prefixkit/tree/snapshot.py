"""One moment of a prefix tree, frozen into flat arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints


@dataclass(frozen=True, eq=False)
class TreeSnapshot:
    """A tree's nodes in depth-first (pre-)order; the empty root is left out, so a forest has several roots.

    A node's child with the most leaves comes last, its other children in order of arrival.  A snapshot that was not
    made by a tree may list children in any order.

    The subtree of node ``n`` is the contiguous range ``[n, subtree_end[n])``.  Token ``i`` of node ``n`` has
    position ``start[n] + i`` in its sequences, and its KV lies ``first_slot[n] + i`` slots into the node's pages
    ``pages[page_indptr[n]:page_indptr[n + 1]]``.  A leaf may have reserved pages after the pages of its tokens.

    Attributes:
        version: The tree's structure version.  Two snapshots of one tree with equal versions have the same nodes,
            parents, starts and order.  In the later one, leaves that grew have a larger ``length`` and more ``pages``;
            neither ever shrinks.  ``computed`` and the sequences may differ.
        page_size: Tokens per page.
        parent: ``[nodes]`` index of the parent, -1 for a root.
        subtree_end: ``[nodes]`` one past the last node of the subtree.
        start: ``[nodes]`` position of the node's first token.
        length: ``[nodes]`` tokens in the node.
        computed: ``[nodes]`` how many tokens of the node, from the first, have KV in the pool.
        first_slot: ``[nodes]`` offset of the first token in the node's first page.
        page_indptr: ``[nodes + 1]`` bounds of each node's pages in ``pages``.
        pages: page numbers, node after node.
        sequence_node: ``[sequences]`` the node at whose end each live sequence ends, ascending (depth-first order);
            -1 for an empty sequence.
        sequence_id: ``[sequences]`` the ids of those sequences.
        content: ``[nodes]`` a number for what each node holds: if two snapshots have the same number, the tokens and KV
            that both have of the node, counted from its start, are equal.  None if not known.
        tree: The identity of the tree: an object equal only to itself, which no other tree's snapshots have while it is
            referenced.  A snapshot that was not made by a tree has an identity of its own.
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
        """Distinct tokens: the tree stores each once."""
        return int(self.length.sum())

    @property
    def num_tokens_unshared(self) -> int:
        """The sum of the sequences' lengths: the tokens they would store without sharing."""
        ends = self.sequence_node[self.sequence_node >= 0]  # empty sequences end at no node
        return int((self.start[ends] + self.length[ends]).sum(dtype=int))

    def depth(self) -> Ints:
        """``[nodes]`` the number of ancestors of each node; 0 for a root."""
        opened = np.arange(self.num_nodes, dtype=np.int32)  # nodes before each in depth-first order ...
        closed = np.cumsum(np.bincount(self.subtree_end, minlength=self.num_nodes + 1))  # ... less those that ended
        return (opened - closed[: self.num_nodes]).astype(np.int32)

    def shared_by(self) -> Ints:
        """``[nodes]`` how many sequences contain each node's tokens: those that end in its subtree."""
        nodes = np.arange(self.num_nodes)
        before = np.searchsorted(self.sequence_node, nodes)
        return (np.searchsorted(self.sequence_node, self.subtree_end) - before).astype(np.int32)

    def slots(self, node: NDArray[np.integer], offset: NDArray[np.integer]) -> NDArray[np.int64]:
        """Pool slots of tokens ``offset[i]`` of nodes ``node[i]``; the arrays broadcast."""
        within = self.first_slot[node].astype(np.int64) + offset
        page = self.pages[self.page_indptr[node] + within // self.page_size].astype(np.int64)
        slots: NDArray[np.int64] = page * self.page_size + within % self.page_size
        return slots
