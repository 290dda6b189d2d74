"""Front coding of token sequences: in lexicographic order, each without the prefix that it shares with the one before.

The longest prefix that a sequence shares with any earlier one, it shares with the one just before it, so each shared
token is stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prefixkit.tree.arrays import Ints, Longs
from prefixkit.tree.tokens import in_front_coding


@dataclass(frozen=True, eq=False)
class FrontCoded:
    """Distinct sequences, none of which is a prefix of another.

    Attributes:
        lengths: int64 ``[sequences]`` tokens of each.
        shared: int64 ``[sequences]`` the length of the prefix that each shares with the sequence before it.
        tokens: int32 ``[sum(lengths - shared)]`` the tokens after these prefixes, one sequence after another.
    """

    lengths: Longs
    shared: Longs
    tokens: Ints

    def __iter__(self) -> Iterator[tuple[Ints, int, int]]:
        """For each sequence: its tokens, how many of them it shares, and where in ``tokens`` its other ones begin."""
        tokens, begin = self.tokens[:0], 0
        for length, shared in zip(self.lengths.tolist(), self.shared.tolist(), strict=True):
            end = begin + length - shared
            tokens = np.concatenate((tokens[:shared], self.tokens[begin:end]))
            yield tokens, shared, begin
            begin = end


def front_coded(sequences: Sequence[Ints]) -> tuple[FrontCoded, list[int]]:
    """Front-code sequences (at least one, none empty); returns also the number of each sequence that is stored."""
    stored = [(number, shared) for number, shared in in_front_coding(sequences) if shared < len(sequences[number])]
    lengths, shared = np.array([(len(sequences[number]), shared) for number, shared in stored]).T
    tokens = np.concatenate([sequences[number][shared:] for number, shared in stored])
    return FrontCoded(lengths, shared, tokens), [number for number, _ in stored]
