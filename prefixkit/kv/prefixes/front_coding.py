"""Token sequences by front coding: in lexicographic order, each without the tokens that it shares with the one before.

What a sequence shares with any before it, it shares with the one just before: so each shared token is there once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prefixkit.tree.arrays import Ints, Longs
from prefixkit.tree.tokens import in_front_coding


@dataclass(frozen=True, eq=False)
class FrontCoded:
    """Distinct sequences, none of which begins another.

    Attributes:
        lengths: int64 ``[sequences]`` tokens of each.
        shared: int64 ``[sequences]`` how many of these the one before begins with.
        tokens: int32 ``[sum(lengths - shared)]`` the others, one sequence after another.
    """

    lengths: Longs
    shared: Longs
    tokens: Ints

    def __iter__(self) -> Iterator[tuple[Ints, int, int]]:
        """The tokens of each sequence, how many it shares, and where in ``tokens`` the others begin."""
        tokens, begin = self.tokens[:0], 0
        for length, shared in zip(self.lengths.tolist(), self.shared.tolist(), strict=True):
            end = begin + length - shared
            tokens = np.concatenate((tokens[:shared], self.tokens[begin:end]))
            yield tokens, shared, begin
            begin = end


def front_coded(sequences: Sequence[Ints]) -> tuple[FrontCoded, list[int]]:
    """The distinct tokens of sequences, at least one of at least one token each; and which these sequences are."""
    stored = [(number, shared) for number, shared in in_front_coding(sequences) if shared < len(sequences[number])]
    lengths, shared = np.array([(len(sequences[number]), shared) for number, shared in stored]).T
    tokens = np.concatenate([sequences[number][shared:] for number, shared in stored])
    return FrontCoded(lengths, shared, tokens), [number for number, _ in stored]
