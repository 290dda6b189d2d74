"""Grammars by xgrammar (0.2.8): JSON schemas, regular expressions, EBNF.

    session.generate(prompts, grammar=json_schema(schema), n=64)

What xgrammar would leave out of a JSON schema is refused.  Three things stay wider in it than they should be: strings
of a JSON schema with ``minLength`` or ``maxLength`` may hold control characters, which JSON forbids (``pattern`` has
them not), ``oneOf`` is ``anyOf`` where alternatives may overlap, and negated classes such as ``[^0]`` let encoded
surrogates pass, which are no UTF-8.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixkit.extras import require
from prefixkit.integrations.xgrammar_schemas import refuse_left_out
from prefixkit.sampling.grammar import as_rules, as_schema, shortened

require("xgrammar", "xgrammar")
import xgrammar  # noqa: E402

_AT = re.compile(r"^\[[\d:]+\] \S+: (Check failed: \([^)]*\) is false: )?")  # time and place in xgrammar's own sources


@dataclass(frozen=True)
class XGrammar:
    """What :func:`json_schema`, :func:`regex` and :func:`ebnf` make.

    Attributes:
        kind: What ``text`` is.
        text: Schema, expression or rules.
        whitespace: Whether JSON may have whitespace between its tokens.
    """

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str
    whitespace: bool = True

    def __repr__(self) -> str:
        return f"XGrammar({self.kind}, {shortened(self.text)!r}{'' if self.whitespace else ', no whitespace'})"

    @staticmethod
    def compiler(tokens: Sequence[bytes], end: int) -> _Compiler:
        """See ``Grammar``."""
        given = [*tokens, b""] if end == len(tokens) else list(tokens)
        info = xgrammar.TokenizerInfo(given, xgrammar.VocabType.RAW, vocab_size=len(given), stop_token_ids=[end])
        # The session keeps compiled grammars, so that the package need not keep them too.
        threads = min(8, os.cpu_count() or 1)
        return _Compiler(xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False), len(tokens), end)

    def compile(self, compiler: _Compiler) -> XGrammarMatcher:
        """See ``Grammar``."""
        inner, separators = compiler.inner, None if self.whitespace else (",", ":")
        try:
            if self.kind == "json_schema":
                found = inner.compile_json_schema(self.text, any_whitespace=self.whitespace, separators=separators)
            else:
                found = (inner.compile_regex if self.kind == "regex" else inner.compile_grammar)(self.text)
        except RuntimeError as error:  # its own class for all that is wrong
            raise ValueError(f"{self.kind} is refused by xgrammar: {_AT.sub('', str(error)).strip()}") from error
        return XGrammarMatcher(xgrammar.GrammarMatcher(found), compiler.vocab, compiler.end)


class _Compiler(NamedTuple):
    """xgrammar's, its tokens, and the one that stands for the end."""

    inner: xgrammar.GrammarCompiler
    vocab: int
    end: int


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
    """Its threads serve all calls."""
    return xgrammar.BatchGrammarMatcher()


def json_schema(schema: Any, *, whitespace: bool = True) -> XGrammar:
    """Texts that are JSON of a schema.

    Args:
        schema: A dict, its JSON text, or a class of pydantic.
        whitespace: Whether there may be whitespace between JSON's tokens; False: there is none.

    Raises:
        TypeError, ValueError: it is no schema, or one of which xgrammar leaves out something.
    """
    text = as_schema(schema)
    refuse_left_out(json.loads(text))
    return XGrammar("json_schema", text, bool(whitespace))


def regex(pattern: str) -> XGrammar:
    """Texts that ``pattern``, a regular expression, matches in full; TypeError or ValueError where it is no text."""
    return XGrammar("regex", as_rules("a regular expression", pattern))


def ebnf(rules: str) -> XGrammar:
    """Texts of a grammar in EBNF, as GGML writes it (GBNF): of its ``rules``, ``root ::= ...`` is where it begins.

    Raises:
        TypeError, ValueError: it is no text; whether its rules are well-formed is found when it is first used.
    """
    return XGrammar("ebnf", as_rules("a grammar", rules))
