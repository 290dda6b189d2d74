"""A handle on one sequence of tokens in the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.node import Node

if TYPE_CHECKING:
    from prefixkit.tree.radix import PrefixTree


class Sequence:
    """The tokens from the root to the end of ``node``.  An empty sequence ends at the root.

    Attributes:
        id: unique within the tree, never reused.
        node: where it ends; splits, merges and extensions of the tree keep it right.
        tree: the tree that holds it; None once released.
    """

    __slots__ = ("id", "node", "tree")

    def __init__(self, id: int, node: Node, tree: PrefixTree) -> None:
        self.id = id
        self.node = node
        self.tree: PrefixTree | None = tree

    def __repr__(self) -> str:
        return f"Sequence(id={self.id}, length={self.length}{', released' if self.tree is None else ''})"

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.node.start + self.node.length

    def tokens(self) -> NDArray[np.int32]:
        """``[length]`` token ids, a new array.

        Raises:
            ValueError: the sequence has been released.
        """
        if self.tree is None:
            raise ValueError(f"sequence {self.id} has been released; read its tokens before releasing it")
        tokens = np.empty(self.length, np.int32)
        node: Node | None = self.node
        while node is not None:
            tokens[node.start : node.start + node.length] = node.tokens
            node = node.parent
        return tokens
