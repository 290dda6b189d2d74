"""The protocols of grammars: which tokens may follow a text, and whether the text may end there.

Modules of ``prefixkit.integrations`` make grammars; users may pass their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Matcher(Protocol):
    """The state of one text in a grammar.

    The bits of a row are laid out as for the op ``sample``: bit ``t % 32`` of word ``t // 32`` belongs to token ``t``.
    The bit of ``end`` says whether the text may end.

    Attributes:
        vocab: Number of tokens of the vocabulary.
        end: The token that represents the end.
    """

    vocab: int
    end: int

    def fork(self) -> Self:
        """A copy in the same state, which then advances independently."""

    @classmethod
    def accept(cls, matchers: Sequence[Self], tokens: Sequence[int]) -> Sequence[bool]:
        """Advance each matcher by its token; False where the token may not follow: the matcher is then unusable.

        Args:
            matchers: Matchers of one class, of any grammars.
            tokens: A token for each.
        """

    @classmethod
    def fill(cls, matchers: Sequence[Self], rows: Sequence[int], bits: NDArray[np.int32]) -> None:
        """Write the tokens that may follow, for each matcher into its row of ``bits``.

        Args:
            matchers: Matchers of one class, of any grammars.
            rows: A row of ``bits`` for each.
            bits: ``[any, words]`` int32, C-contiguous, with words for all tokens and the end; bits after these are
                undefined afterwards.
        """


@runtime_checkable
class Grammar(Protocol):
    """A grammar that texts must match; hashable, because it is compiled once for each tokenizer."""

    @staticmethod
    def compiler(tokens: Sequence[bytes], end: int) -> Any:
        """The object that compiles grammars of this class for a vocabulary.

        Args:
            tokens: ``[vocab]`` the bytes that each token adds to a text; empty for tokens that no text contains:
                special tokens, and padding of the vocabulary.
            end: One of these tokens, or ``vocab``: the token that represents the end, whichever tokens end samples.
        """

    def compile(self, compiler: Any) -> Matcher:
        """A matcher before the first token, which is forked for each text.

        Args:
            compiler: The result of :meth:`compiler` for the vocabulary.

        Raises:
            ValueError: the grammar is malformed; the message says where.
        """


def as_schema(schema: Any) -> str:
    """The text of a JSON schema, given as text, as a dict, or as a class that has ``model_json_schema`` (pydantic).

    Raises:
        TypeError, ValueError: the schema is none of these, or not JSON.
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


def shortened(text: str) -> str:
    """A text of at most 60 characters, for a repr."""
    return text if len(text) <= 60 else f"{text[:59]}…"


def as_rules(name: str, text: object) -> str:
    """The text of a regular expression or of rules; TypeError or ValueError, naming ``name``, if not text or empty."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a string, got {type(text).__name__} {text!r}")
    if not text:
        raise ValueError(f"{name} must not be empty: no text would match but the empty one")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{name} must be text that UTF-8 can encode, got a lone surrogate in {shortened(text)!r}")
    return text
