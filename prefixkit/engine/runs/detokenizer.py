"""Token ids to text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, eq=False)
class Detokenizer:
    """How tokens become text.

    Attributes:
        decode: Token ids to text, without special tokens; None: samples have no text, and stop strings are refused.
        special_tokens: The text of tokens that ``decode`` leaves out, by their ids.
    """

    decode: Decode | None = None
    special_tokens: Mapping[int, str] = field(default_factory=dict)


def detokenizer_of(tokenizer: Any, special: bool) -> Detokenizer:
    """That of a tokenizer of transformers, or none.

    Args:
        tokenizer: Has ``decode``; None: there is no text.
        special: Whether special tokens are looked for in stop strings.
    """
    if tokenizer is None:
        return Detokenizer()

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return Detokenizer(decode, special_tokens(tokenizer, decode) if special else {})


def special_tokens(tokenizer: Any, decode: Decode) -> dict[int, str]:
    """The text of the special tokens that ``decode`` leaves out, by their ids.

    Args:
        tokenizer: One of transformers; of any other that does not list its special tokens, none are known.
        decode: Token ids to text without special tokens.
    """
    listed = getattr(tokenizer, "added_tokens_decoder", {}).items()
    texts = {int(token): str(added) for token, added in listed if getattr(added, "special", False)}
    ids, names = getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ())
    texts |= {int(token): str(name) for token, name in zip(ids, names, strict=True)}
    return {token: text for token, text in texts.items() if text and not decode([token])}
