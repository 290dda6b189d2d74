"""Grammars by llguidance (1.9): JSON schemas, regular expressions, EBNF.

    session.generate(prompts, grammar=regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"))

Where a grammar allows one text only, samples may spell it with any tokens, not only with the tokenizer's own ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from prefixkit.extras import require
from prefixkit.integrations.grammar_text import Compiler, GrammarText
from prefixkit.integrations.llguidance_schemas import refuse_large_numbers
from prefixkit.sampling.grammar import shortened

require("llguidance", "llguidance")
import llguidance  # noqa: E402
from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: E402

# Any tokens may spell the only allowed text, as the model prefers; by default llguidance forces the tokenizer's own.
_HEADER = '%llguidance {"no_forcing": true}'


@dataclass(frozen=True, repr=False)
class LLGrammar(GrammarText):
    """A grammar that llguidance compiles."""

    @classmethod
    def json_schema(cls, schema: Any, *, whitespace: bool = True) -> Self:
        """See `GrammarText.json_schema` for ``schema`` and ``whitespace``; ValueError if it has a number
        beyond 2**53."""
        made = super().json_schema(schema, whitespace=whitespace)
        refuse_large_numbers(json.loads(made.text))
        return made

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """The grammar of texts that the regular expression ``pattern`` matches in full; TypeError or ValueError if it
        is not text, or if its last backslash escapes nothing.
        """
        made = super().regex(pattern)
        if (len(made.text) - len(made.text.rstrip("\\"))) % 2:  # llguidance would ignore it
            raise ValueError(f"regex ends with a backslash that escapes nothing: {shortened(made.text)!r}")
        return made

    @staticmethod
    def compiler(tokens: Sequence[bytes], end: int) -> Compiler:
        """See ``Grammar``."""
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokens, end))
        return Compiler(llguidance.LLTokenizer(wrapped), len(tokens), end)

    def compile(self, compiler: Compiler) -> LLGrammarMatcher:
        """See ``Grammar``."""
        try:
            lark = self._lark()
        except Exception as error:  # llguidance's EBNF parser raises errors of many classes
            raise self.refused("llguidance", error) from error
        inner = llguidance.LLMatcher(compiler.inner, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
        if inner.is_error():
            raise self.refused("llguidance", inner.get_error())
        return LLGrammarMatcher(inner, compiler.vocab, compiler.end)

    def _lark(self) -> str:
        """The grammar in Lark's syntax, with a header."""
        if self.kind == "json_schema":
            options = {"x-guidance": {"whitespace_flexible": self.whitespace}}
            return f"{_HEADER}\nstart: %json {json.dumps(json.loads(self.text) | options)}"
        if self.kind == "regex":
            return f"{_HEADER}\nstart: /{llguidance.regex_to_lark(self.text, use_ascii='')}/"
        return str(gbnf_to_lark(self.text)).replace("%llguidance {}", _HEADER, 1)


class _Vocabulary:
    """The vocabulary in the form that llguidance takes.

    Tokens that no text contains stay empty, which llguidance never allows.  As special tokens they would all be called
    by the same bytes, and each mask would try every one of them: 15,000 of them take ten times as long as a mask.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens, self.eos_token_id = [*tokens[:end], b"<end>", *tokens[end + 1 :]], end
        self.special_token_ids = [end]

    def __call__(self, text: bytes) -> list[int]:
        """Raise: without forced text, llguidance never asks for the tokens of a text."""
        raise TypeError("grammars are of bytes")


class LLGrammarMatcher:
    """See ``Matcher``; ``inner`` is llguidance's own."""

    def __init__(self, inner: llguidance.LLMatcher, vocab: int, end: int) -> None:
        self._inner, self.vocab, self.end = inner, vocab, end

    def fork(self) -> LLGrammarMatcher:
        return LLGrammarMatcher(self._inner.deep_copy(), self.vocab, self.end)

    @classmethod
    def accept(cls, matchers: Sequence[LLGrammarMatcher], tokens: Sequence[int]) -> list[bool]:
        return [one._inner.consume_token(token) for one, token in zip(matchers, tokens, strict=True)]

    @classmethod
    def fill(cls, matchers: Sequence[LLGrammarMatcher], rows: Sequence[int], bits: NDArray[np.int32]) -> None:
        # One by one: forks of a matcher share a lexer, which a lock protects, so threads would wait for each other.
        first, stride = bits.ctypes.data, bits.strides[0]
        for one, row in zip(matchers, rows, strict=True):
            one._inner.unsafe_compute_mask_ptr(first + row * stride, stride)
            if one._inner.is_error():  # it has met a limit, and the mask it wrote would let the text end
                bits[row] = 0


json_schema, regex, ebnf = LLGrammar.json_schema, LLGrammar.regex, LLGrammar.ebnf
