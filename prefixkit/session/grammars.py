"""Grammars of sampling parameters, compiled once for each tokenizer."""

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

# Most compiled grammars cached for one tokenizer: one of a schema takes some MiB; the least recently used are dropped.
MOST_COMPILED = 256

_compiled: WeakKeyDictionary[Any, dict[tuple[int, int], CompiledGrammars]] = WeakKeyDictionary()


class CompiledGrammars:
    """A cache of grammars compiled for one tokenizer and a model's vocabulary; threads may share it.

    Args:
        tokenizer: A tokenizer of transformers.
        vocab: Size of the model's vocabulary, which may be larger or smaller than the tokenizer's.
        most: Most compiled grammars in the cache.

    Raises:
        ValueError: it is unknown which bytes the tokenizer's tokens add to a text.
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
        """The matcher of a grammar before the first token; callers must fork it."""
        with self._lock:
            found = self._matchers.pop(grammar, None)
            if found is None:
                found = self._compile(grammar)
            self._matchers[grammar] = found  # now the most recently used
            while len(self._matchers) > self._most:
                self._matchers.pop(next(iter(self._matchers)))
            return found

    def _compile(self, grammar: Grammar) -> Matcher:
        kind = type(grammar)
        if kind not in self._compilers:
            self._compilers[kind] = grammar.compiler(self._tokens, self._end)
        return grammar.compile(self._compilers[kind])


def matchers_of(facts: ModelFacts, tokenizer: Any, each: Sequence[SamplingParams | BeamParams]) -> list[Matcher | None]:
    """For each parameters the matcher of their grammar before the first token; None without a grammar.

    Raises:
        ValueError: a grammar is malformed, or there is no tokenizer for which it could be compiled.
    """
    grammars = [own.grammar if isinstance(own, SamplingParams) else None for own in each]
    return [None if grammar is None else matcher_of(facts, tokenizer, grammar) for grammar in grammars]


def matcher_of(facts: ModelFacts, tokenizer: Any, grammar: Grammar) -> Matcher:
    """The matcher of one grammar before the first token; raises as :func:`matchers_of` does."""
    if tokenizer is None:
        raise ValueError(
            "a grammar is of text, but tokenizer is None; pass the model's tokenizer, or use logits_processors"
        )
    try:
        known = _compiled.setdefault(tokenizer, {})
    except TypeError:  # no hash: not a tokenizer of transformers, and refused below
        known = {}
    key = facts.vocab_size, len(tokenizer) if hasattr(tokenizer, "__len__") else 0  # tokens may have been added
    if key not in known:
        known[key] = CompiledGrammars(tokenizer, facts.vocab_size)
    return known[key].matcher(grammar)
