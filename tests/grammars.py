"""A grammar of token ids for engines over the fake model, and what samples under it must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefixkit.engine.request import Request
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.rng import sample_key, uniforms
from prefixkit.sampling.specification import NothingAllowed, sample_tokens
from prefixkit.testing.fake_model import VOCAB, logits_after

STOP = 3


@dataclass(frozen=True)
class Residues:
    """Tokens whose sum with those before has one of a few remainders.

    Attributes:
        modulus: One token in this number may follow.
        end: The text may end once it has this many tokens.
        most: Nothing may follow this many tokens; the text may end there only if it may before.
    """

    modulus: int
    end: int = 3
    most: int = 10**9

    @staticmethod
    def compiler(tokens: Sequence[bytes], end: int) -> Any:
        return len(tokens)

    def compile(self, compiler: Any) -> ResidueMatcher:
        return ResidueMatcher(self, compiler)

    def allowed(self, tokens: Sequence[int], vocab: int = VOCAB) -> list[int]:
        first = -sum(tokens) % self.modulus
        return [t for t in range(first, vocab, self.modulus) if t != STOP and len(tokens) < self.most]


class ResidueMatcher:
    def __init__(self, grammar: Residues, vocab: int, tokens: Sequence[int] = ()) -> None:
        self.grammar, self.vocab, self.end, self.tokens = grammar, vocab, vocab, list(tokens)

    def fork(self) -> ResidueMatcher:
        return type(self)(self.grammar, self.vocab, self.tokens)

    @classmethod
    def accept(cls, matchers: Sequence[ResidueMatcher], tokens: Sequence[int]) -> list[bool]:
        for one, token in zip(matchers, tokens, strict=True):
            assert token in one.grammar.allowed(one.tokens, one.vocab), "sampled under a mask"
            one.tokens.append(token)
        return [True] * len(matchers)

    @classmethod
    def fill(cls, matchers: Sequence[ResidueMatcher], rows: Sequence[int], bits: np.ndarray) -> None:
        for one, row in zip(matchers, rows, strict=True):
            assert bits.shape[1] == one.vocab // 32 + 1, "words for all tokens and the end, as packages insist on"
            held = np.ones(32 * bits.shape[1], bool)  # bits behind those that are defined are set
            held[: one.vocab + 1] = False
            held[one.grammar.allowed(one.tokens, one.vocab)] = True
            held[one.vocab] = len(one.tokens) >= one.grammar.end
            bits[row] = np.packbits(held, bitorder="little").view(np.int32)


def asked(index: int, prompt: Any, params: SamplingParams, vocab: int = VOCAB) -> Request:
    """A request as a session makes it."""
    return Request(index, prompt, params, matcher=params.grammar and params.grammar.compile(vocab))


def alone(prompt: Sequence[int], params: SamplingParams, index: int) -> tuple[list[int], str]:
    """Tokens of a sample, sampled token by token, and how it ends."""
    tokens, steps = list(map(int, prompt)), np.arange(params.max_new_tokens)
    begin, grammar = len(tokens), params.grammar
    for u in uniforms(np.full(len(steps), sample_key(params.seed, index, tokens)), steps)[:, None]:
        own, may, may_end = tokens[begin:], None, False
        if isinstance(grammar, Residues):
            may_end = len(own) >= grammar.end
            may = np.array(grammar.allowed(own) + [STOP] * (may_end and STOP in (params.stop_token_ids or ())), int)
        try:
            logits = torch.from_numpy(logits_after(tokens))[None]
            token = int(sample_tokens(logits, params, u, [np.array(tokens)], allowed=[may])[0])
        except NothingAllowed:
            return own, "stop" if may_end else "dead_end"
        tokens.append(token)
        if token in (params.stop_token_ids or ()):
            return tokens[begin:], "stop"
    return tokens[begin:], "length"
