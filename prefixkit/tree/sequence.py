"""The tokens from the root of a prefix tree to the end of a node."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prefixkit.tree.arrays import Ints
from prefixkit.tree.node import Node
from prefixkit.tree.tokens import as_tokens


class Sequence:
    """The tokens from the root to the end of ``node``.  An empty sequence ends at the root.

    Attributes:
        id: unique within the tree, never reused.
        node: the node where the sequence ends; splits, merges and extensions of the tree update it.
        tree: the tree that holds it; None once released.
    """

    __slots__ = ("id", "node", "tree")

    def __init__(self, id: int, node: Node, tree: object) -> None:
        self.id = id
        self.node = node
        self.tree: object | None = tree

    def __repr__(self) -> str:
        return f"Sequence(id={self.id}, length={self.length}{', released' if self.tree is None else ''})"

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.node.start + self.node.length

    @property
    def computed(self) -> int:
        """How many tokens of the sequence, from the first, have KV."""
        node: Node = self.node
        while node.parent is not None and not node.computed:
            node = node.parent
        return node.start + node.computed

    def tokens(self) -> NDArray[np.int32]:
        """``[length]`` token ids, a new array; ValueError if the sequence, or some of its tokens, were released."""
        keys, spelling = self.keys(), getattr(self.tree, "spelling", None)
        return keys if spelling is None else spelling.tokens(keys)

    def keys(self) -> NDArray[np.int32]:
        """``[length]`` the keys that the tree stores for the tokens, a new array; raises as :meth:`tokens`."""
        if self.tree is None:
            raise ValueError(f"sequence {self.id} has been released; read its tokens before releasing it")
        keys = np.empty(self.length, np.int32)
        for node in self._whole_path():
            keys[node.start : node.start + node.length] = node.tokens
        return keys

    def slots(self) -> NDArray[np.int64]:
        """``[length]`` pool slots of the tokens; ValueError if some tokens were released."""
        slots = np.empty(self.length, np.int64)
        for node in self._whole_path():
            slots[node.start : node.start + node.length] = node.slots
        return slots

    def path(self) -> Iterator[Node]:
        """The nodes that hold the tokens, from the last to the first, then the root."""
        node: Node | None = self.node
        while node is not None:
            yield node
            node = node.parent

    def _whole_path(self) -> Iterator[Node]:
        for node in self.path():
            if node.behind_gap:
                raise ValueError(
                    f"sequence {self.id} holds no tokens before position {node.start} and after its first ones: they "
                    "were released once no query saw them; keep a list of its tokens, or read sequence.path()"
                )
            yield node


def check_live(tree: object, sequence: Sequence) -> None:
    """Raise ValueError unless a sequence is live in this tree."""
    if sequence.tree is not tree:
        what = "has been released" if sequence.tree is None else "belongs to another tree"
        raise ValueError(f"sequence {sequence.id} {what}; use a live sequence of this tree")


def next_tokens(tree: object, sequences: Ordered[Sequence], tokens: ArrayLike) -> list[int]:
    """Check the arguments of `PrefixTree.extend_each`, and return the tokens; no sequences at all are valid."""
    array = np.asarray(tokens)
    values: list[int] = as_tokens(array).tolist() if array.size else []
    if len(values) != len(sequences):
        raise ValueError(f"one token for each sequence: got {len(values)} tokens for {len(sequences)} sequences")
    if len(set(sequences)) != len(sequences):
        raise ValueError("a sequence is listed twice; extend_each appends one token to each, so list each once")
    if {sequence.tree for sequence in sequences} - {tree}:
        for sequence in sequences:
            check_live(tree, sequence)
    return values


def leaf_tokens(tree: object, sequences: Ordered[Sequence], tokens: ArrayLike) -> Ints:
    """Check the arguments of `PrefixTree.extend_leaves`, and return the tokens; no sequences at all are valid."""
    array = np.asarray(tokens)
    if array.ndim != 2 or len(array) != len(sequences) or not array.shape[1]:
        raise ValueError(f"one row of tokens for each of {len(sequences)} sequences: got shape {list(array.shape)}")
    for sequence in sequences:
        if sequence.tree is not tree:
            check_live(tree, sequence)
    count, nodes = array.shape[1], {sequence.node for sequence in sequences}
    if len(nodes) < len(sequences) or not all(node.grows_in_place and not node.pages_to_add(count) for node in nodes):
        raise ValueError(f"each sequence must end at a leaf of its own that has reserved {count} tokens; see reserve")
    return as_tokens(array.reshape(-1)).reshape(array.shape) if array.size else array.astype(np.int32)
