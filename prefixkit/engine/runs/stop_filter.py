"""A filter that finds the samples that may have met a stop string, for a whole step at once, without decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints

MET = -1  # the state of a sample that may have met a stop string
_UNKNOWN = -2


@dataclass(frozen=True, eq=False)
class Pattern:
    """Strings that are searched for in the bytes of tokens.

    Attributes:
        strings: At least one string, none empty.
        bytes_of: Returns the bytes of a token.
    """

    strings: tuple[str, ...]
    bytes_of: Callable[[int], bytes]

    def after(self, held: bytes, token: int) -> bytes | None:
        """The longest suffix of ``held`` and the token's bytes that begins a string; None if a string is met."""
        sought, found = [string.encode() for string in self.strings], held + self.bytes_of(token)
        if any(one in found for one in sought):
            return None
        for size in range(min(max(map(len, sought)) - 1, len(found)), 0, -1):
            if any(one.startswith(found[-size:]) for one in sought):
                return found[-size:]
        return b""


class StopFilter:
    """Tracks each sample by the number of a state: the longest suffix of its text that begins a stop string.

    In UTF-8 a string occurs in a text exactly where its bytes occur in the text's bytes.  The suffix of nearly all
    samples is empty, and their states after a token are looked up in one indexing operation.

    Args:
        patterns: A sample has met a stop string once one of them has.
    """

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._patterns = patterns
        self._held: list[tuple[bytes, ...]] = [(b"",) * len(patterns)]  # by state; state 0: empty suffix
        self._states = {self._held[0]: 0}
        self._from_nothing = np.full(1, _UNKNOWN, np.int32)  # by token
        self._from: dict[tuple[int, int], int] = {}  # by state and token

    def advance(self, states: Ints, tokens: NDArray[np.integer]) -> Ints:
        """``[rows]`` the states after one more token each; :data:`MET` where a stop string may have been met.

        Args:
            states: ``[rows]`` the states before, none of them :data:`MET`; 0 for a sample without tokens.
            tokens: ``[rows]`` ids, not negative.
        """
        if (most := int(tokens.max(initial=0))) >= len(self._from_nothing):
            more = np.full(1 << (most + 1).bit_length(), _UNKNOWN, np.int32)
            more[: len(self._from_nothing)] = self._from_nothing
            self._from_nothing = more
        after: Ints = self._from_nothing[tokens]
        if len(unknown := np.flatnonzero(after == _UNKNOWN)):
            for token in set(tokens[unknown].tolist()):
                self._from_nothing[token] = self._after(0, token)
            after = self._from_nothing[tokens]
        for row in np.flatnonzero(states).tolist():
            key = int(states[row]), int(tokens[row])
            if key not in self._from:
                self._from[key] = self._after(*key)
            after[row] = self._from[key]
        return after

    def _after(self, state: int, token: int) -> int:
        held = list[bytes]()
        for pattern, before in zip(self._patterns, self._held[state], strict=True):
            after = pattern.after(before, token)
            if after is None:
                return MET
            held.append(after)
        key = tuple(held)
        if key not in self._states:
            self._states[key] = len(self._held)
            self._held.append(key)
        return self._states[key]
