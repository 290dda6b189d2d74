"""Keys of texts whose tokens may see later tokens: the KV of such a token depends on what comes after it.

A *span* is a run of tokens that see one another.  None of them sees beyond the span's end, and a span is shared as a
whole or not at all.  So a tree stores *keys* in place of token ids.  The key of a token outside spans is its id.  The n
tokens of a span have n consecutive keys, above all token ids, which no other span has.  Two texts share a span's KV
only if all of its tokens are equal; the tree compares keys, and knows nothing of spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints, Longs, with_capacity

# The lowest key of any span: token ids are below it.
FIRST_KEY = 1 << 30


class Keys(np.ndarray[tuple[int], np.dtype[np.int32]]):
    """``[n]`` int32 keys of a text; see :meth:`Spelling.keys`."""


class Spelling:
    """The keys of the texts of one tree.

    Args:
        spans: Maps the length of a text to ``[n, 2]``: begin and end of its spans, ascending and disjoint.
    """

    def __init__(self, spans: Callable[[int], Longs]) -> None:
        self._spans = spans
        self._first: dict[bytes, int] = {}  # the first key of each span, by the bytes of its tokens
        self._unused: dict[int, list[int]] = {}  # first keys that can be used again, by the span's length
        self._tokens, self._place, self._left = (np.empty(0, np.int32) for _ in range(3))
        self.size = 0

    def keys(self, tokens: Ints, text: int | None = None) -> Keys:
        """The keys of ``tokens``; keys are returned as they are.

        ``text``: how many tokens, from the first, belong to the text whose tokens may see later ones; the tokens after
        it see only earlier ones, like generated tokens.  None: all belong to it.

        Raises:
            ValueError: a token id is so large that it could be a key of a span.
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
        """``[n]`` how many tokens of the same span come after each key's token; 0 outside spans."""
        found, (at, numbers) = np.zeros(len(keys), np.int32), _in_spans(keys)
        found[at] = self._left[numbers]
        return found

    def place(self, keys: Ints) -> Ints:
        """``[n]`` how many tokens of the same span come before each key's token; 0 outside spans."""
        found, (at, numbers) = np.zeros(len(keys), np.int32), _in_spans(keys)
        found[at] = self._place[numbers]
        return found

    def longest(self, length: int) -> int:
        """Tokens of the longest span of a text of ``length`` tokens; 0 if it has no span."""
        return int(np.diff(self._spans(length)).max(initial=0))

    def retain(self, held: Iterable[Ints]) -> None:
        """Drop all spans without a key in ``held``, which are all arrays of keys in use."""
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
    """The indices of keys that belong to spans, and these keys less ``FIRST_KEY``."""
    at = np.flatnonzero(np.asarray(keys) >= FIRST_KEY)
    return at, np.asarray(keys)[at].astype(np.int64) - FIRST_KEY
