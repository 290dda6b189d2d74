"""Grammars that are texts: JSON schemas, regular expressions, EBNF; the package that reads them compiles them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from prefixkit.sampling.grammar import as_rules, as_schema, shortened


@dataclass(frozen=True)
class GrammarText:
    """What ``json_schema``, ``regex`` and ``ebnf`` of a package make.

    Attributes:
        kind: What ``text`` is.
        text: Schema, expression or rules.
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
        """Texts that are JSON of a schema.

        Args:
            schema: A dict, its JSON text, or a class of pydantic.
            whitespace: Whether there may be whitespace between JSON's tokens; False: there is none.

        Raises:
            TypeError, ValueError: it is no schema, or one of which the package would leave out something.
        """
        return cls("json_schema", as_schema(schema), bool(whitespace))

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Texts that ``pattern``, a regular expression, matches in full; TypeError or ValueError: it is no text."""
        return cls("regex", as_rules("a regular expression", pattern))

    @classmethod
    def ebnf(cls, rules: str) -> Self:
        """Texts of a grammar in EBNF, as GGML writes it (GBNF): of its ``rules``, ``root ::= ...`` is where it begins.

        Raises:
            TypeError, ValueError: it is no text; whether its rules are well-formed is found when it is first used.
        """
        return cls("ebnf", as_rules("a grammar", rules))

    def refused(self, package: str, why: object) -> ValueError:
        """The error that says why a package does not take it."""
        return ValueError(f"{self.kind} is refused by {package}: {str(why).strip()}")


class Compiler(NamedTuple):
    """What a package compiles grammars for.

    Attributes:
        inner: Its own tokenizer or compiler.
        vocab: Tokens of the vocabulary.
        end: The token that stands for the end.
    """

    inner: Any
    vocab: int
    end: int
