"""The distinct tokens of all texts of a call, and after which of them something is wanted.

Distinct texts, in lexicographic order, are *contexts*: what one shares with any before it, it shares with the one just
before.  Its other tokens are its own: laid end to end, the own tokens of all contexts are the distinct tokens of the
call, each at one *index*, ancestors first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.tokens import common_prefix

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


class Text(NamedTuple):
    """Tokens, and those after which something is wanted.

    Attributes:
        prompt, more: ``[length]`` int32 ids; the text is both, joined as it is asked for.
        wanted: Positions after whose tokens something is wanted, ascending.
    """

    prompt: Ints
    wanted: Longs
    more: Ints = np.empty(0, np.int32)

    @property
    def tokens(self) -> Ints:
        return np.concatenate((self.prompt, self.more))


def continued(prompts: Sequence[Ints], continuations: Sequence[Sequence[Ints]]) -> list[Text]:
    """Prompts with each of their continuations but its last token, after which nothing is wanted."""
    return [
        Text(prompt, np.arange(len(prompt) - 1, len(prompt) - 1 + len(tokens)), tokens[:-1])
        for prompt, each in zip(prompts, continuations, strict=True)
        for tokens in each
    ]


@dataclass(frozen=True, eq=False)
class Contexts:
    """All contexts of a call, and what is wanted of their tokens.

    Attributes:
        texts: ``[contexts]``.
        shared: ``[contexts]`` tokens that each has in common with the one before.
        first: ``[contexts]`` the index of its first own token.
        wanted: ``[tokens]`` whether something is wanted after this token.
        index: ``[wanted tokens]`` the indices of the wanted tokens of all texts of the call, in its order.
    """

    texts: list[Text]
    shared: list[int]
    first: list[int]
    wanted: NDArray[np.bool_]
    index: Longs


def lay_out(texts: Sequence[Text]) -> Contexts:
    """Find the distinct tokens of all texts, and after which of them something is wanted."""
    # Big-endian bytes compare like the tokens themselves.
    order = sorted(range(len(texts)), key=lambda text: texts[text].tokens.astype(">u4").tobytes())
    chosen, shared, first, count = list[Text](), list[int](), list[int](), 0
    before, path = np.empty(0, np.int32), np.empty(0, np.int64)  # a context, and the indices of its tokens
    indices = [path] * len(texts)
    for number in order:
        text, tokens = texts[number], texts[number].tokens
        common = common_prefix(before, tokens)
        if own := len(tokens) - common:
            chosen.append(text)
            shared.append(common)
            first.append(count)
            path = np.concatenate((path[:common], np.arange(count, count + own)))
            before, count = tokens, count + own
        indices[number] = path[text.wanted]
    index = np.concatenate(indices)
    wanted = np.zeros(count, np.bool_)
    wanted[index] = True
    return Contexts(chosen, shared, first, wanted, index)
