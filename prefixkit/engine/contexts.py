"""The distinct tokens of all prompts and continuations of a call, and after which of them logits are wanted.

A prompt and a continuation without its last token, after which nothing is wanted, are a *context*.  Contexts are
sorted, so what one shares with any before it, it shares with the one just before.  Its other tokens are its own: laid
end to end, the own tokens of all contexts are the distinct tokens of the call, each at one *place*, ancestors first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.tokens import common_prefix

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Contexts:
    """All contexts of a call, and the tokens whose log-probabilities they give.

    Attributes:
        prompts, continuations: Those of the call.
        chosen: ``[contexts, 2]`` the prompt and the continuation that make each; distinct contexts, in lexicographic
            order.
        shared: ``[contexts]`` tokens that each has in common with the one before.
        first: ``[contexts]`` the place of its first own token.
        wanted: ``[places]`` whether the logits after this token are wanted.
        place: ``[scored]`` the places of the tokens before each scored token, ascending.
        target: ``[scored]`` the ids of the scored tokens.
        number: ``[scored]`` which they are, counted through all continuations in the order of the call.
    """

    prompts: Sequence[Ints]
    continuations: Sequence[Sequence[Ints]]
    chosen: list[tuple[int, int]]
    shared: list[int]
    first: list[int]
    wanted: NDArray[np.bool_]
    place: Longs
    target: Longs
    number: Longs

    def tokens(self, context: int) -> Ints:
        """``[length]`` the tokens of a context."""
        return context_of(self.prompts, self.continuations, self.chosen[context])

    def whose(self, number: int) -> tuple[int, int, int]:
        """The prompt, the continuation and the place in it of a token, counted through all continuations."""
        for prompt, each in enumerate(self.continuations):
            for continuation, tokens in enumerate(each):
                if number < len(tokens):
                    return prompt, continuation, number
                number -= len(tokens)
        raise IndexError("there are not so many tokens")


def lay_out(prompts: Sequence[Ints], continuations: Sequence[Sequence[Ints]]) -> Contexts:
    """Find the distinct tokens of all contexts, and which of their logits are wanted."""
    pairs = [(index, number) for index, each in enumerate(continuations) for number in range(len(each))]
    # Big-endian bytes compare like the tokens themselves.
    order = sorted(
        range(len(pairs)), key=lambda at: context_of(prompts, continuations, pairs[at]).astype(">u4").tobytes()
    )
    chosen, shared, first, count = list[tuple[int, int]](), list[int](), list[int](), 0
    longest = max(len(prompts[index]) + len(continuations[index][number]) for index, number in pairs)
    before, path = np.empty(0, np.int32), np.empty(longest, np.int64)  # a context, and the places of its tokens
    places = [path] * len(pairs)
    for at in order:
        tokens = context_of(prompts, continuations, pairs[at])
        common = common_prefix(before, tokens)
        if common < len(tokens):
            own = len(tokens) - common
            chosen.append(pairs[at])
            shared.append(common)
            first.append(count)
            path[common : len(tokens)] = np.arange(count, count + own)
            before, count = tokens, count + own
        places[at] = path[len(prompts[pairs[at][0]]) - 1 : len(tokens)].copy()
    place = np.concatenate(places)
    target = np.concatenate([tokens for each in continuations for tokens in each])
    number = np.argsort(place, kind="stable")
    wanted = np.zeros(count, np.bool_)
    wanted[place] = True
    return Contexts(
        prompts, continuations, chosen, shared, first, wanted, place[number], target[number].astype(np.int64), number
    )


def context_of(prompts: Sequence[Ints], continuations: Sequence[Sequence[Ints]], pair: tuple[int, int]) -> Ints:
    """``[length]`` the tokens of a prompt and of one of its continuations, without the last one."""
    index, number = pair
    return np.concatenate((prompts[index], continuations[index][number][:-1]))
