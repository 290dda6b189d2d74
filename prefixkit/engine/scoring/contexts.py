"""The distinct tokens of all texts of a call, and which of them are wanted.

Texts that are not a prefix of another text are *contexts*, sorted as for front coding.  The tokens that a context does
not share with the one before it are its *own* tokens.  Laid end to end, the own tokens of all contexts are the distinct
tokens of the call, each at one *index*, ancestors first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prefixkit.tree.arrays import Ints, Longs
from prefixkit.tree.tokens import in_front_coding


class Text(NamedTuple):
    """Tokens, and the positions after which results are wanted.

    Attributes:
        tokens: ``[length]`` int32 ids.
        wanted: Positions of the tokens after which results are wanted, ascending.
    """

    tokens: Ints
    wanted: Longs


def continued(prompts: Sequence[Ints], continuations: Sequence[Sequence[Ints]]) -> list[Text]:
    """Each prompt with each of its continuations, without the last token, after which no result is wanted."""
    return [
        Text(np.concatenate((prompt, tokens[:-1])), np.arange(len(prompt) - 1, len(prompt) - 1 + len(tokens)))
        for prompt, each in zip(prompts, continuations, strict=True)
        for tokens in each
    ]


@dataclass(frozen=True, eq=False)
class Contexts:
    """All contexts of a call, and their wanted tokens.

    Attributes:
        tokens: ``[contexts]`` the token ids of each context.
        first: ``[contexts + 1]`` the index of each context's first own token, and last the number of distinct tokens.
        index: ``[wanted tokens]`` the indices of the wanted tokens of all texts, in the order of the call.
    """

    tokens: list[Ints]
    first: list[int]
    index: Longs


def lay_out(texts: Sequence[Text]) -> Contexts:
    """Find the distinct tokens of all texts, and which of them are wanted."""
    tokens, first = list[Ints](), [0]
    path = np.empty(0, np.int64)  # the indices of the tokens of a context
    indices = [path] * len(texts)
    for number, shared in in_front_coding([text.tokens for text in texts]):
        own, wanted = texts[number]
        if shared < len(own):
            tokens.append(own)
            first.append(first[-1] + len(own) - shared)
            path = np.concatenate((path[:shared], np.arange(*first[-2:])))
        indices[number] = path[wanted]
    return Contexts(tokens, first, np.concatenate(indices))
