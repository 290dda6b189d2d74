"""How texts are written in a tree whose tokens may see later ones: KV of such a token depends on what comes after it.

A *span* is a run of tokens that see one another: none of them sees beyond its end, and it is shared as a whole or not
at all.  So a tree holds *keys* in place of token ids: that of a token outside of spans is its id, and a span of n
tokens has n keys of its own, consecutive numbers above all token ids, which no other span has.  Two texts share a
span's KV only if its tokens are equal from the first to the last; the tree compares keys, and knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints, Longs, with_capacity

# Of the first span: token ids are below it.
FIRST_KEY = 1 << 30


class Keys(np.ndarray[tuple[int], np.dtype[np.int32]]):
    """``[n]`` int32 keys of a text; see :meth:`Spelling.keys`."""


class Spelling:
    """The keys of the texts of one tree.

    Args:
        spans: From the length of a text to ``[n, 2]``: begin and end of its spans, ascending and apart.
    """

    def __init__(self, spans: Callable[[int], Longs]) -> None:
        self._spans = spans
        self._first: dict[bytes, int] = {}  # number of the first key of a span, by its tokens
        self._unused: dict[int, list[int]] = {}  # numbers of first keys that can be given again, by length
        self._tokens, self._place, self._left = (np.empty(0, np.int32) for _ in range(3))
        self.size = 0

    def keys(self, tokens: Ints, text: int | None = None) -> Keys:
        """The keys of ``tokens``; keys are returned as they are.

        ``text``: how many of the tokens, from the first, are a text whose tokens may see later ones, and those after it
        follow one by one, as those that a model has generated; None: all are.

        Raises:
            ValueError: a token id that is one of a key.
        """
        if isinstance(tokens, Keys):
            return tokens
        if int(tokens.max(initial=0)) >= FIRST_KEY:
            raise ValueError(f"token ids must be below {FIRST_KEY} where tokens see later ones, got {tokens.max()}")
        found = tokens.astype(np.int32)
        for begin, end in self._spans(len(tokens) if text is None else text).tolist():
            first = self._first_of(found[begin:end])
            found[begin:end] = np.arange(first, first + end - begin)
        return found.view(Keys)

    def tokens(self, keys: Ints) -> Ints:
        """The token ids of keys."""
        found, (at, numbers) = np.array(keys, np.int32), _in_spans(keys)
        found[at] = self._tokens[numbers]
        return found

    def left(self, keys: Ints) -> Ints:
        """``[n]`` how many tokens of its span come after each key's; 0 outside of spans."""
        found, (at, numbers) = np.zeros(len(keys), np.int32), _in_spans(keys)
        found[at] = self._left[numbers]
        return found

    def place(self, keys: Ints) -> Ints:
        """``[n]`` how many tokens of its span come before each key's; 0 outside of spans."""
        found, (at, numbers) = np.zeros(len(keys), np.int32), _in_spans(keys)
        found[at] = self._place[numbers]
        return found

    def longest(self, length: int) -> int:
        """Tokens of the longest span of a text of ``length`` tokens; 0 where there is none."""
        return int(np.diff(self._spans(length)).max(initial=0))

    def retain(self, held: Iterable[Ints]) -> None:
        """Drop all spans but those of which ``held`` has keys: no other array of keys is in use."""
        used = np.zeros(self.size, np.bool_)
        for keys in held:
            used[_in_spans(keys)[1]] = True
        for content, first in list(self._first.items()):
            number, length = first - FIRST_KEY, len(content) // 4
            if not used[number : number + length].any():
                del self._first[content]
                self._unused.setdefault(length, []).append(first)

    @property
    def held(self) -> int:
        """Tokens of all spans that have keys."""
        return sum(map(len, self._first)) // 4

    def _first_of(self, tokens: Ints) -> int:
        """The first key of a span."""
        content, length = tokens.tobytes(), len(tokens)
        if content not in self._first:
            unused = self._unused.get(length)
            self._first[content] = first = unused.pop() if unused else FIRST_KEY + self.size
            number = first - FIRST_KEY
            if number == self.size:
                self.size += length
                if self.size > len(self._tokens):
                    arrays = (self._tokens, self._place, self._left)
                    self._tokens, self._place, self._left = (with_capacity(one, number, length) for one in arrays)
            self._tokens[number : number + length] = tokens
            self._place[number : number + length] = np.arange(length)
            self._left[number : number + length] = np.arange(length)[::-1]
        return self._first[content]


def _in_spans(keys: Ints) -> tuple[NDArray[np.intp], Longs]:
    """Where keys are those of spans, and their numbers."""
    at = np.flatnonzero(np.asarray(keys) >= FIRST_KEY)
    return at, np.asarray(keys)[at].astype(np.int64) - FIRST_KEY
