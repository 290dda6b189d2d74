"""Grammars given as text: JSON schemas, regular expressions, EBNF; a package such as xgrammar compiles them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from prefixkit.sampling.grammar import as_rules, as_schema, shortened


@dataclass(frozen=True)
class GrammarText:
    """A grammar as ``json_schema``, ``regex`` and ``ebnf`` of an integration make it.

    Attributes:
        kind: The kind of ``text``.
        text: The schema, the expression or the rules.
        whitespace: Whether JSON may have whitespace between its tokens.
    """

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str
    whitespace: bool = True

    def __repr__(self) -> str:
        whitespace = "" if self.whitespace else ", no whitespace"
        return f"{type(self).__name__}({self.kind}, {shortened(self.text)!r}{whitespace})"

    @classmethod
    def json_schema(cls, schema: Any, *, whitespace: bool = True) -> Self:
        """The grammar of JSON texts that match a schema.

        Args:
            schema: A dict, its JSON text, or a class of pydantic.
            whitespace: Whether JSON may have whitespace between its tokens.

        Raises:
            TypeError, ValueError: it is not a schema, or the package would ignore a part of it.
        """
        return cls("json_schema", as_schema(schema), bool(whitespace))

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Texts that the regular expression ``pattern`` matches in full; TypeError or ValueError if it is not text."""
        return cls("regex", as_rules("a regular expression", pattern))

    @classmethod
    def ebnf(cls, rules: str) -> Self:
        """A grammar in the EBNF of GGML (GBNF); the rule ``root ::= ...`` is its start.

        Raises:
            TypeError, ValueError: ``rules`` is not text; malformed rules raise when the grammar is first used.
        """
        return cls("ebnf", as_rules("a grammar", rules))

    def refused(self, package: str, why: object) -> ValueError:
        """The error that says why a package refuses the grammar."""
        return ValueError(f"{self.kind} is refused by {package}: {str(why).strip()}")


class Compiler(NamedTuple):
    """A vocabulary for which a package compiles grammars.

    Attributes:
        inner: The package's own tokenizer or compiler.
        vocab: Number of tokens of the vocabulary.
        end: The token that represents the end.
    """

    inner: Any
    vocab: int
    end: int


def beyond(value: Any, least: int, most: int) -> int | None:
    """An integer in a JSON value that is below ``least`` or above ``most``; None if there is none."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, int) and not least <= one <= most:
            return one
        left += one if isinstance(one, list) else one.values() if isinstance(one, dict) else ()
    return None
