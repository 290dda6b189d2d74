"""What sampling asks of a grammar: which tokens may follow a text, and whether it may end there.

A grammar is a noun that packages of ``prefixkit.integrations`` make; a user's own serves likewise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Matcher(Protocol):
    """Where one text is in a grammar.

    Bits of a row are those of the op ``sample``, bit ``t % 32`` of word ``t // 32`` for token ``t``.  That of ``end``
    says whether the text may end.

    Attributes:
        vocab: Tokens of the vocabulary.
        end: The token that stands for the end.
    """

    vocab: int
    end: int

    def fork(self) -> Self:
        """Another one at the same place, which goes on apart."""

    @classmethod
    def accept(cls, matchers: Sequence[Self], tokens: Sequence[int]) -> Sequence[bool]:
        """Let each go on by its token; False where that may not follow, and the matcher is of no more use.

        Args:
            matchers: Of one class, of any grammars.
            tokens: A token for each.
        """

    @classmethod
    def fill(cls, matchers: Sequence[Self], rows: Sequence[int], bits: NDArray[np.int32]) -> None:
        """Write which tokens may follow, for each of several matchers into its row of ``bits``.

        Args:
            matchers: Of one class, of any grammars.
            rows: A row of ``bits`` for each.
            bits: ``[any, words]`` int32, C-contiguous, with words for all tokens and the end; bits behind these may
                become anything.
        """


@runtime_checkable
class Grammar(Protocol):
    """What texts are to match; hashable, for it is compiled once for each tokenizer."""

    @staticmethod
    def compiler(tokens: Sequence[bytes], end: int) -> Any:
        """What compiles grammars of this class for a vocabulary.

        Args:
            tokens: ``[vocab]`` the bytes that each token adds to a text; none for those that no text holds: special
                tokens, and padding of the vocabulary.
            end: One of these, or ``vocab``: the token that stands for the end, whatever ends samples.
        """

    def compile(self, compiler: Any) -> Matcher:
        """A matcher before the first token, which is forked for each text.

        Args:
            compiler: What :meth:`compiler` has made for the vocabulary.

        Raises:
            ValueError: the grammar is malformed; the message says where.
        """


def as_schema(schema: Any) -> str:
    """The text of a JSON schema, given as text, as a dict, or as a class that has ``model_json_schema`` (pydantic).

    Raises:
        TypeError, ValueError: it is none of these, or no JSON.
    """
    given = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
    try:
        given = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a JSON schema must be JSON: {error}") from error
    if not isinstance(given, dict):
        raise TypeError(f"a JSON schema must be a dict or the text of one, got {type(given).__name__} {given!r}")
    return text


def shortened(text: str, most: int = 60) -> str:
    """A text of at most ``most`` characters, for a repr."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def as_rules(name: str, text: object) -> str:
    """The text of a grammar that is none of JSON; TypeError or ValueError, for ``name``, where it is none, or empty."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a string, got {type(text).__name__} {text!r}")
    if not text:
        raise ValueError(f"{name} must not be empty: no text would match but the empty one")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{name} must be text that UTF-8 can encode, got a lone surrogate in {shortened(text)!r}")
    return text
