"""The rows of a left-padded batch as sequences of a prefix tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints, Longs
from prefixkit.tree.node import Node
from prefixkit.tree.pages import OutOfPages, pages_for
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence
from prefixkit.tree.tokens import in_front_coding


class Rows:
    """The rows of a batch, each a sequence of one tree, which stores shared prefixes once.

    Args:
        tree: An empty tree.
        tokens: ``[rows, length]`` token ids.
        pad: ``[rows]`` how many tokens of each row, from the left, are padding.
        fork: Whether rows diverge as beams do, most of which end soon.  Else each row continues, and an extra sequence
            is held at the end of each shared prompt, so that its rows begin on pages of their own.
        text: How many tokens of each row, padding included, belong to the text whose tokens may see later ones
            (:meth:`Spelling.keys`); None: all.

    Attributes:
        sequences: The sequence of each row.
        pad: ``[rows]`` padding tokens before each row.
        length: Tokens of each row, padding included.
        text: As the argument; `trim` lowers it to the new length.

    Raises:
        OutOfPages: the tree has too few pages; it is unchanged.  See :func:`pages_of_rows`.
    """

    def __init__(self, tree: PrefixTree, tokens: Ints, pad: Longs, *, fork: bool, text: int | None = None) -> None:
        self.tree, self.pad = tree, pad
        self.length: int = tokens.shape[1]
        self.text = self.length if text is None else text
        self.sequences: list[Sequence] = []
        by_tokens: dict[bytes, Sequence] = {}
        try:
            for row, skipped in zip(tokens, pad.tolist(), strict=True):
                unpadded = row[skipped:]
                equal = by_tokens.get(unpadded.tobytes())
                keys = tree.keys_of(unpadded, max(0, self.text - skipped))
                sequence = tree.insert(keys) if equal is None else tree.fork(equal)[0]
                by_tokens.setdefault(unpadded.tobytes(), sequence)
                self.sequences.append(sequence)
        except OutOfPages:
            for sequence in self.sequences:
                tree.release(sequence)
            raise
        self._fork, self._shared_ends = fork, list[Sequence]()
        self._hold_shared_ends()

    def __len__(self) -> int:
        return len(self.sequences)

    def extend(self, tokens: Ints) -> None:
        """Append ``[rows, count]`` tokens.

        Raises:
            OutOfPages: too few pages are free; nothing has changed.
        """
        count = tokens.shape[1]
        if count == 1:
            self.tree.extend_each(self.sequences, tokens[:, 0])
        else:
            alike: dict[tuple[Node, bytes], list[int]] = {}
            for row, sequence in enumerate(self.sequences):
                alike.setdefault((sequence.node, tokens[row].tobytes()), []).append(row)
            ones = [self.sequences[rows[0]] for rows in alike.values()]
            self.tree.allocator.check(sum(self.tree.pages_to_extend(one, count) for one in ones))
            for rows in alike.values():
                one, *others = rows
                for other in others:
                    self.tree.release(self.sequences[other])
                self.tree.extend(self.sequences[one], tokens[one])
                for other in others:
                    self.sequences[other] = self.tree.fork(self.sequences[one])[0]
            self._hold_shared_ends()
        self.length += count

    def _hold_shared_ends(self) -> None:
        """Hold a sequence at each node where several rows end, unless rows diverge as beams do."""
        before, shared = self._shared_ends, Counter(sequence.node for sequence in self.sequences)
        ends = {sequence.node: sequence for sequence in self.sequences if shared[sequence.node] > 1}
        self._shared_ends = [] if self._fork else [self.tree.fork(sequence)[0] for sequence in ends.values()]
        for sequence in before:
            self.tree.release(sequence)

    def detach(self) -> list[Sequence]:
        """Hand all sequences that the rows hold over to the caller; the rows hold none afterwards."""
        held, self.sequences, self._shared_ends = [*self.sequences, *self._shared_ends], [], []
        return held

    def select(self, rows: list[int]) -> None:
        """Replace row ``i`` by row ``rows[i]``: rows listed again are forked, rows not listed are released."""
        self.sequences = select(self.tree, self.sequences, rows)
        self.pad = self.pad[rows]

    def trim(self, length: int) -> None:
        """Shorten each row to ``length`` tokens, padding included."""
        self.pad, self.text = np.minimum(self.pad, length), min(self.text, length)
        for sequence, pad in zip(self.sequences, self.pad.tolist(), strict=True):
            self.tree.trim(sequence, length - pad)
        self.length = length

    def tokens(self) -> Ints:
        """``[rows, length]`` token ids; padding is 0."""
        return self._right_aligned(np.zeros((len(self), self.length), np.int32), Sequence.tokens)

    def slots(self) -> Longs:
        """``[rows, length]`` pool slots of all tokens; those of padding are arbitrary."""
        return self._right_aligned(np.zeros((len(self), self.length), np.int64), Sequence.slots)

    def _right_aligned(self, rows: NDArray[Any], own: Callable[[Sequence], NDArray[Any]]) -> NDArray[Any]:
        for row, sequence in zip(rows, self.sequences, strict=True):
            row[len(row) - sequence.length :] = own(sequence)
        return rows

    def last_tokens(self, count: int) -> Iterator[tuple[int, int, Node, int]]:
        """The last ``count`` tokens of each row, without padding: row, index from the end, node, offset in the node."""
        for row, sequence in enumerate(self.sequences):
            node, at = sequence.node, 0
            while node.parent is not None and at < count:
                for offset in range(node.length - 1, max(-1, node.length - 1 - (count - at)), -1):
                    yield row, at, node, offset
                    at += 1
                node = node.parent


def select(tree: PrefixTree, sequences: Ordered[Sequence], parents: Ordered[int]) -> list[Sequence]:
    """New sequences, the ``i``-th of which continues ``sequences[parents[i]]``.

    A sequence that ``parents`` lists again is forked, and one that it does not list is released.
    """
    taken, chosen = [False] * len(sequences), list[Sequence]()
    for parent in parents:
        chosen.append(tree.fork(sequences[parent])[0] if taken[parent] else sequences[parent])
        taken[parent] = True
    for sequence, selected in zip(sequences, taken, strict=True):
        if not selected:
            tree.release(sequence)
    return chosen


def distinct_tokens(tokens: Ints, pad: Longs) -> tuple[int, int]:
    """Tokens of all rows, and how many of them are distinct: each shared token counts once.

    ``tokens`` and ``pad`` are as :class:`Rows` takes them.
    """
    rows = [row[skipped:] for row, skipped in zip(tokens, pad.tolist(), strict=True)]
    total = sum(map(len, rows))
    return total, total - sum(shared for _, shared in in_front_coding(rows))


def pages_of_rows(tokens: Ints, pad: Longs, new: int, page_size: int, *, fork: bool, shared: bool = True) -> int:
    """Pages for the rows and ``new`` more tokens of each; rows that fork take as many as beams mostly do.

    ``shared``: rows share their common prefixes; else, where tokens see later ones, rows may share nothing.
    """
    total, distinct = distinct_tokens(tokens, pad)
    distinct = distinct if shared else total
    own = pages_for(new, page_size) + 1
    # Beams fill at least 0.6 of the slots they hold; the remaining pages are for searches that fork more than most.
    return pages_for(distinct, page_size) + len(tokens) * (2 * own if fork else own) + len(tokens)
