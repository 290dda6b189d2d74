"""The distinct tokens of all texts of a call, and after which of them something is wanted.

Texts that are not the beginning of another are *contexts*.  Contexts are sorted, so what one shares with any before it,
it shares with the one just before.  Its other tokens are its own: laid end to end, the own tokens of all contexts are
the distinct tokens of the call, each at one *index*, ancestors first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.tokens import common_prefix

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


class Texts(Protocol):
    """Token sequences, made as they are asked for, and the tokens of each after which something is wanted."""

    def __len__(self) -> int: ...

    def tokens(self, text: int) -> Ints:
        """``[length]`` token ids, at least one."""

    def wanted(self, text: int) -> Longs:
        """Positions after whose tokens something is wanted, ascending."""

    def name(self, text: int, number: int) -> str:
        """What messages call the ``number``-th wanted token of a text."""


@dataclass(frozen=True, eq=False)
class Contexts:
    """All contexts of a call, and what is wanted of their tokens.

    Attributes:
        texts: Those of the call.
        chosen: ``[contexts]`` the text that each is; distinct contexts, in lexicographic order.
        shared: ``[contexts]`` tokens that each has in common with the one before.
        first: ``[contexts]`` the index of its first own token.
        wanted: ``[tokens]`` whether something is wanted after this token.
        index: ``[wanted tokens]`` the indices of the wanted tokens of all texts, ascending.
        number: ``[wanted tokens]`` which they are, counted through the wanted tokens of all texts in their order.
    """

    texts: Texts
    chosen: list[int]
    shared: list[int]
    first: list[int]
    wanted: NDArray[np.bool_]
    index: Longs
    number: Longs

    def tokens(self, context: int) -> Ints:
        """``[length]`` the tokens of a context."""
        return self.texts.tokens(self.chosen[context])

    def name(self, number: int) -> str:
        """What messages call a wanted token, counted through those of all texts."""
        for text in range(len(self.texts)):
            if number < (count := len(self.texts.wanted(text))):
                return self.texts.name(text, number)
            number -= count
        raise IndexError("there is no such wanted token")


def lay_out(texts: Texts) -> Contexts:
    """Find the distinct tokens of all texts, and after which of them something is wanted."""
    # Big-endian bytes compare like the tokens themselves.
    order = sorted(range(len(texts)), key=lambda text: texts.tokens(text).astype(">u4").tobytes())
    chosen, shared, first, count = list[int](), list[int](), list[int](), 0
    before, path = np.empty(0, np.int32), np.empty(0, np.int64)  # a context, and the indices of its tokens
    indices = [path] * len(texts)
    for text in order:
        tokens = texts.tokens(text)
        common = common_prefix(before, tokens)
        if common < len(tokens):
            own = len(tokens) - common
            chosen.append(text)
            shared.append(common)
            first.append(count)
            path = np.concatenate((path[:common], np.arange(count, count + own)))
            before, count = tokens, count + own
        indices[text] = path[texts.wanted(text)]
    index = np.concatenate(indices)
    number = np.argsort(index, kind="stable")
    wanted = np.zeros(count, np.bool_)
    wanted[index] = True
    return Contexts(texts, chosen, shared, first, wanted, index[number], number)


@dataclass(frozen=True, eq=False)
class Continued:
    """Prompts with each of their continuations but its last token, after which nothing is wanted (see ``Texts``).

    Attributes:
        prompts, continuations: Those of a call.
        pairs: The prompt and the continuation that make each text.
    """

    prompts: Sequence[Ints]
    continuations: Sequence[Sequence[Ints]]
    pairs: list[tuple[int, int]]

    @classmethod
    def of(cls, prompts: Sequence[Ints], continuations: Sequence[Sequence[Ints]]) -> Continued:
        """All texts of a call, in its order."""
        pairs = [(index, number) for index, each in enumerate(continuations) for number in range(len(each))]
        return cls(prompts, continuations, pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def tokens(self, text: int) -> Ints:
        index, number = self.pairs[text]
        return np.concatenate((self.prompts[index], self.continuations[index][number][:-1]))

    def wanted(self, text: int) -> Longs:
        index, number = self.pairs[text]
        before = len(self.prompts[index]) - 1
        return np.arange(before, before + len(self.continuations[index][number]))

    def name(self, text: int, number: int) -> str:
        return "token {} of continuation {} of prompt {}".format(number, *self.pairs[text][::-1])
