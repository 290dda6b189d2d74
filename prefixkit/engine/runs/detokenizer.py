"""Conversion of token ids to text, and the text that each token adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from prefixkit.engine.runs.stop_filter import Pattern, StopFilter
from prefixkit.engine.runs.token_bytes import TokenBytes

Decode = Callable[[list[int]], str]


class Detokenizer:
    """Turns tokens into text.

    One detokenizer serves any number of calls: it caches the bytes of tokens and the filters of stop strings.

    Args:
        decode: Token ids to text, without special tokens; None: samples have no text, and stop strings are refused.
        special_tokens: Returns the text of each special token that ``decode`` leaves out, keyed by id.
        token_bytes: The bytes that each token adds to the text, if known: stop strings are then searched for in the
            bytes, and only samples that may have met one are decoded.
    """

    def __init__(
        self,
        decode: Decode | None = None,
        special_tokens: Callable[[], Mapping[int, str]] = dict,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        self.decode, self._token_bytes, self._special = decode, token_bytes, special_tokens
        self._filters: dict[tuple[str, ...], StopFilter | None] = {}
        self._special_in: dict[tuple[str, ...], Mapping[int, str]] = {(): {}}

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        """The text of each special token that ``decode`` leaves out, keyed by id."""
        return self._special()

    def stop_filter(self, strings: tuple[str, ...]) -> StopFilter | None:
        """The filter that finds, in whole steps, samples that may have met one of these strings; None if none can."""
        if strings not in self._filters:
            self._filters[strings] = self._filter_of(strings)
        return self._filters[strings]

    def special_in(self, strings: tuple[str, ...]) -> Mapping[int, str]:
        """All special tokens if one of the strings contains the text of one; else an empty mapping."""
        if strings not in self._special_in:
            found = any(text in string for string in strings for text in self.special_tokens.values())
            self._special_in[strings] = self.special_tokens if found else {}
        return self._special_in[strings]

    def _filter_of(self, strings: tuple[str, ...]) -> StopFilter | None:
        if self._token_bytes is None or not strings or any("\ufffd" in string for string in strings):
            return None  # decoders write U+FFFD for bytes that are not a character
        of_token, named = self._token_bytes.__getitem__, self.special_in(strings)
        special = tuple(string for string in strings if any(text in string for text in named.values()))
        plain = tuple(string for string in strings if string not in special)
        patterns = [Pattern(plain, of_token)] if plain else []
        if special:
            texts = {token: text.encode() for token, text in named.items()}
            patterns.append(Pattern(special, lambda token: texts.get(token) or of_token(token)))
        return StopFilter(patterns)


def detokenizer_of(tokenizer: Any) -> Detokenizer:
    """The detokenizer of a transformers tokenizer.

    Args:
        tokenizer: Has ``decode``; None: samples have no text.
    """
    if tokenizer is None:
        return Detokenizer()
    token_bytes = TokenBytes.of(tokenizer)
    rust = None if token_bytes is None else token_bytes.backend.decode

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True) if rust is None else rust(tokens))

    return Detokenizer(decode, lambda: special_tokens(tokenizer, decode), token_bytes)


def special_tokens(tokenizer: Any, decode: Decode) -> dict[int, str]:
    """The text of the special tokens that ``decode`` leaves out, keyed by id.

    Args:
        tokenizer: A tokenizer of transformers; any other that does not list its special tokens has none.
        decode: Token ids to text without special tokens.
    """
    listed = getattr(tokenizer, "added_tokens_decoder", {}).items()
    texts = {int(token): str(added) for token, added in listed if getattr(added, "special", False)}
    ids, names = getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ())
    texts |= {int(token): str(name) for token, name in zip(ids, names, strict=True)}
    return {token: text for token, text in texts.items() if text and not decode([token])}
