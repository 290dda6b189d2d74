"""Grammars by xgrammar (0.2.8): JSON schemas, regular expressions, EBNF.

    session.generate(prompts, grammar=json_schema(schema), n=64)

A JSON schema of which xgrammar would ignore or misread a part is refused, and so is a ``pattern`` that asks for quotes,
backslashes or control characters, which it would not escape.  In three cases xgrammar allows more than it should:
strings of a JSON schema with ``minLength`` or ``maxLength`` may hold control characters, which JSON forbids, ``oneOf``
is treated as ``anyOf`` where alternatives may overlap, and negated classes such as ``[^0]`` match encoded surrogates,
which are not valid UTF-8.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from prefixkit.extras import require
from prefixkit.integrations.grammar_text import Compiler, GrammarText
from prefixkit.integrations.xgrammar_patterns import misread
from prefixkit.integrations.xgrammar_schemas import refuse_left_out
from prefixkit.sampling.grammar import shortened

require("xgrammar", "xgrammar")
import xgrammar  # noqa: E402

_AT = re.compile(r"^\[[\d:]+\] \S+: (Check failed: \([^)]*\) is false: )?")  # time, and position in xgrammar's sources


@dataclass(frozen=True, repr=False)
class XGrammar(GrammarText):
    """A grammar that xgrammar compiles."""

    @classmethod
    def json_schema(cls, schema: Any, *, whitespace: bool = True) -> Self:
        """See `GrammarText.json_schema` for ``schema`` and ``whitespace``; ValueError if xgrammar ignores a part."""
        made = super().json_schema(schema, whitespace=whitespace)
        refuse_left_out(json.loads(made.text))
        return made

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """The grammar of texts that the regular expression ``pattern`` matches in full; TypeError or ValueError if it
        is not text, or has an escape that xgrammar reads as a letter, such as ``\\A``.
        """
        made = super().regex(pattern)
        if (part := misread(made.text)) is not None:
            raise ValueError(
                f"regex: xgrammar reads {part!r} as a letter in {shortened(made.text)!r}; write what it stands for, "
                "or leave it out: samples match the expression in full"
            )
        return made

    @staticmethod
    def compiler(tokens: Sequence[bytes], end: int) -> Compiler:
        """See ``Grammar``."""
        given = [*tokens, b""] if end == len(tokens) else list(tokens)
        info = xgrammar.TokenizerInfo(given, xgrammar.VocabType.RAW, vocab_size=len(given), stop_token_ids=[end])
        # The session caches compiled grammars, so xgrammar need not cache them too.
        threads = min(8, os.cpu_count() or 1)
        return Compiler(xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False), len(tokens), end)

    def compile(self, compiler: Compiler) -> XGrammarMatcher:
        """See ``Grammar``."""
        inner, separators = compiler.inner, None if self.whitespace else (",", ":")
        try:
            if self.kind == "json_schema":
                found = inner.compile_json_schema(self.text, any_whitespace=self.whitespace, separators=separators)
            else:
                found = (inner.compile_regex if self.kind == "regex" else inner.compile_grammar)(self.text)
        except RuntimeError as error:  # xgrammar raises this class for all errors
            raise self.refused("xgrammar", _AT.sub("", str(error))) from error
        return XGrammarMatcher(xgrammar.GrammarMatcher(found), compiler.vocab, compiler.end)


class XGrammarMatcher:
    """See ``Matcher``; ``inner`` is xgrammar's own."""

    def __init__(self, inner: xgrammar.GrammarMatcher, vocab: int, end: int) -> None:
        self._inner, self.vocab, self.end = inner, vocab, end

    def fork(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._inner.fork(), self.vocab, self.end)

    @classmethod
    def accept(cls, matchers: Sequence[XGrammarMatcher], tokens: Sequence[int]) -> list[bool]:
        found: list[bool] = _batch().batch_accept_token([one._inner for one in matchers], list(tokens))
        return found

    @classmethod
    def fill(cls, matchers: Sequence[XGrammarMatcher], rows: Sequence[int], bits: NDArray[np.int32]) -> None:
        _batch().batch_fill_next_token_bitmask([one._inner for one in matchers], bits, list(rows))


@lru_cache(1)
def _batch() -> xgrammar.BatchGrammarMatcher:
    """The batch matcher.  It starts its threads anew for each batch: 16 take longer to start than 64 masks to fill."""
    return xgrammar.BatchGrammarMatcher(max_threads=min(8, max(1, (os.cpu_count() or 1) // 2)))


json_schema, regex, ebnf = XGrammar.json_schema, XGrammar.regex, XGrammar.ebnf
