"""Grammars of samplings, compiled once for each tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from prefixkit.engine.request import BeamParams
from prefixkit.engine.runs.token_bytes import TokenBytes
from prefixkit.models import ModelFacts
from prefixkit.sampling.grammar import Grammar, Matcher
from prefixkit.sampling.params import SamplingParams

# Grammars that stay compiled for one tokenizer: some MiB each, of a schema; those used longest ago go.
MOST_COMPILED = 256

_compiled: WeakKeyDictionary[Any, dict[tuple[int, int], CompiledGrammars]] = WeakKeyDictionary()


class CompiledGrammars:
    """Those of one tokenizer for a model's vocabulary; threads may share it.

    Args:
        tokenizer: One of transformers.
        vocab: Tokens of the model, which may be more or fewer than the tokenizer's.
        most: Grammars that stay compiled.

    Raises:
        ValueError: it is not known which bytes its tokens add to a text.
    """

    def __init__(self, tokenizer: Any, vocab: int, most: int = MOST_COMPILED) -> None:
        token_bytes = TokenBytes.of(tokenizer)
        if token_bytes is None:
            raise ValueError(
                f"grammars need the bytes of each token, which are not known of {type(tokenizer).__name__}; pass a "
                "fast tokenizer of transformers with a byte-level or SentencePiece decoder, or use logits_processors"
            )
        self._tokens = [token_bytes[token] for token in range(vocab)]
        self._end = next((token for token, text in enumerate(self._tokens) if not text), vocab)
        self._compilers: dict[type[Grammar], Any] = {}
        self._matchers: dict[Grammar, Matcher] = {}
        self._most, self._lock = most, threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """That of a grammar before the first token: to be forked."""
        with self._lock:
            found = self._matchers.pop(grammar, None)
            if found is None:
                found = self._compile(grammar)
            self._matchers[grammar] = found  # the last one again
            while len(self._matchers) > self._most:
                self._matchers.pop(next(iter(self._matchers)))
            return found

    def _compile(self, grammar: Grammar) -> Matcher:
        kind = type(grammar)
        if kind not in self._compilers:
            self._compilers[kind] = grammar.compiler(self._tokens, self._end)
        return grammar.compile(self._compilers[kind])


def matchers_of(facts: ModelFacts, tokenizer: Any, each: Sequence[SamplingParams | BeamParams]) -> list[Matcher | None]:
    """For each parameters the matcher of their grammar before the first token; None where there is none.

    Raises:
        ValueError: a grammar is malformed, or there is no tokenizer that it could be compiled for.
    """
    grammars = [own.grammar if isinstance(own, SamplingParams) else None for own in each]
    return [None if grammar is None else matcher_of(facts, tokenizer, grammar) for grammar in grammars]


def matcher_of(facts: ModelFacts, tokenizer: Any, grammar: Grammar) -> Matcher:
    """The matcher of one grammar, likewise."""
    if tokenizer is None:
        raise ValueError(
            "a grammar is of text, but tokenizer is None; pass the model's tokenizer, or use logits_processors"
        )
    try:
        known = _compiled.setdefault(tokenizer, {})
    except TypeError:  # it has no hash: none of transformers' tokenizers, and refused below
        known = {}
    key = facts.vocab_size, len(tokenizer) if hasattr(tokenizer, "__len__") else 0  # tokens may have been added
    if key not in known:
        known[key] = CompiledGrammars(tokenizer, facts.vocab_size)
    return known[key].matcher(grammar)
