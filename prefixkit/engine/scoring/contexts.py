"""The distinct tokens of all texts of a call, and after which of them something is wanted.

Texts that no other begins with are *contexts*, in the order of front coding.  The tokens that one does not share with
the one before are its own: laid end to end, the own tokens of all contexts are the distinct tokens of the call, each at
one *index*, ancestors first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.tokens import in_front_coding

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


class Text(NamedTuple):
    """Tokens, and those after which something is wanted.

    Attributes:
        tokens: ``[length]`` int32 ids.
        wanted: Positions after whose tokens something is wanted, ascending.
    """

    tokens: Ints
    wanted: Longs


def continued(prompts: Sequence[Ints], continuations: Sequence[Sequence[Ints]]) -> list[Text]:
    """Prompts with each of their continuations but its last token, after which nothing is wanted."""
    return [
        Text(np.concatenate((prompt, tokens[:-1])), np.arange(len(prompt) - 1, len(prompt) - 1 + len(tokens)))
        for prompt, each in zip(prompts, continuations, strict=True)
        for tokens in each
    ]


@dataclass(frozen=True, eq=False)
class Contexts:
    """All contexts of a call, and what is wanted of their tokens.

    Attributes:
        tokens: ``[contexts]`` the token ids of each.
        first: ``[contexts + 1]`` the index of its first own token; last how many there are.
        index: ``[wanted tokens]`` the indices of the wanted tokens of all texts of the call, in its order.
    """

    tokens: list[Ints]
    first: list[int]
    index: Longs


def lay_out(texts: Sequence[Text]) -> Contexts:
    """Find the distinct tokens of all texts, and after which of them something is wanted."""
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
