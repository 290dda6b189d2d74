"""A set of token prefixes as a trie in flat arrays: what a prefix file says of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prefixkit.tree.arrays import Ints
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.tokens import MAX_TOKEN, as_tokens


@dataclass(frozen=True, eq=False)
class PrefixTrie:
    """Nodes of a radix trie, parents before their children; siblings begin with different tokens.

    Attributes:
        parents: Integers ``[nodes]``: the index of each node's parent, -1 for those at the root.
        lengths: Integers ``[nodes]``: tokens of each node, at least one.
        tokens: Integers ``[sum(lengths)]``: token ids of one node after another.
        offsets: int64 ``[nodes + 1]``: where each node's tokens begin in ``tokens``.
        starts: int64 ``[nodes]``: the position of each node's first token in its sequence.

    Raises:
        ValueError: the arrays are no such trie; the message says where.
    """

    parents: NDArray[np.integer]
    lengths: NDArray[np.integer]
    tokens: Ints
    offsets: NDArray[np.int64] = field(init=False)
    starts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        parents, lengths, tokens = (np.asarray(array) for array in (self.parents, self.lengths, self.tokens))
        _check(parents, lengths, tokens)
        offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        _check_siblings(parents, tokens[offsets[:-1]])
        starts: list[int] = []
        for parent in parents.tolist():
            starts.append(0 if parent < 0 else starts[parent] + int(lengths[parent]))
        made: dict[str, NDArray[Any]] = {
            "parents": parents.astype(np.int64),
            "lengths": lengths.astype(np.int64),
            "tokens": tokens.astype(np.int32),
            "offsets": offsets,
            "starts": np.array(starts, np.int64),
        }
        for name, array in made.items():
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self.parents)

    def span(self, node: int) -> tuple[int, int]:
        """Where a node's tokens begin and end in ``tokens``."""
        return int(self.offsets[node]), int(self.offsets[node + 1])

    def prefix(self, node: int) -> Ints:
        """``[starts[node] + lengths[node]]`` the tokens from the root to the end of a node, a new array."""
        tokens = np.empty(self.starts[node] + self.lengths[node], np.int32)
        while node >= 0:
            begin, end = self.span(node)
            tokens[self.starts[node] : self.starts[node] + end - begin] = self.tokens[begin:end]
            node = int(self.parents[node])
        return tokens

    def leaves(self) -> NDArray[np.intp]:
        """The nodes without children; with their ancestors they are all nodes."""
        inner = np.zeros(len(self), bool)
        inner[self.parents[self.parents >= 0]] = True
        return np.flatnonzero(~inner)


def trie_of(prefixes: Sequence[ArrayLike]) -> tuple[PrefixTrie, NDArray[np.intp]]:
    """The trie of token prefixes, where each ends at the end of a node.

    Args:
        prefixes: Token ids, one-dimensional integers, at least one each; equal ones, and prefixes of others, may be
            among them.

    Returns:
        The trie; and for each node a prefix that runs through it: the node's tokens are
        ``prefixes[index][start : start + length]`` with the node's ``starts`` and ``lengths``.

    Raises:
        ValueError, TypeError: there are no prefixes, or one is no array of token ids.
    """
    if not len(prefixes):
        raise ValueError("a trie needs at least one prefix, got none")
    given = [as_tokens(prefix) for prefix in prefixes]
    # Big-endian bytes are in the order of the tokens; a prefix comes after what begins with it, whose node it splits.
    order = sorted(range(len(given)), key=lambda index: given[index].astype(">i4").tobytes() + b"\xff")
    tree = PrefixTree(sum(map(len, given)), page_size=1)
    sources = {tree.insert(given[index]).id: index for index in order}
    snapshot, nodes = tree.snapshot(), tree.nodes()
    trie = PrefixTrie(snapshot.parent, snapshot.length, np.concatenate([node.tokens for node in nodes]))
    below = snapshot.sequence_id[np.searchsorted(snapshot.sequence_node, np.arange(len(nodes)))]
    return trie, np.array([sources[id] for id in below.tolist()], np.intp)


def _check(parents: NDArray[Any], lengths: NDArray[Any], tokens: NDArray[Any]) -> None:
    for name, array in (("parents", parents), ("lengths", lengths), ("tokens", tokens)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{name} must be one-dimensional integers, got {array.dtype} of shape {array.shape}")
    if len(parents) != len(lengths) or not len(parents):
        raise ValueError(f"a trie needs nodes, each with parent and length; got {len(parents)} and {len(lengths)}")
    wrong = np.flatnonzero((lengths < 1) | (lengths > len(tokens)))
    if len(wrong):
        raise ValueError(f"node {wrong[0]} has {lengths[wrong[0]]} tokens, of {len(tokens)} in all")
    if int(lengths.sum(dtype=np.int64)) != len(tokens):
        raise ValueError(f"the nodes have {int(lengths.sum(dtype=np.int64))} tokens, but there are {len(tokens)}")
    wrong = np.flatnonzero((parents < -1) | (parents >= np.arange(len(parents))))
    if len(wrong):
        raise ValueError(
            f"node {wrong[0]} has parent {parents[wrong[0]]}; parents come before their children, or are -1"
        )
    wrong = np.flatnonzero((tokens < 0) | (tokens > MAX_TOKEN))
    if len(wrong):
        raise ValueError(f"token {tokens[wrong[0]]} at {wrong[0]} is no token id")


def _check_siblings(parents: NDArray[Any], first: NDArray[Any]) -> None:
    order = np.lexsort((first, parents))
    same = np.flatnonzero((np.diff(parents[order]) == 0) & (np.diff(first[order]) == 0))
    if len(same):
        one, other = sorted(order[same[0] : same[0] + 2].tolist())
        raise ValueError(f"nodes {one} and {other} have the same parent and the same first token, {first[one]}")
