"""The bytes that each token of a tokenizer adds to a text, for decoders that only concatenate them."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
# Methods that transformers' tokenizers inherit: a tokenizer that overrides them may write any text.
_INHERITED = {"decode": "transformers.tokenization_utils_base", "_decode": "transformers.tokenization_utils_tokenizers"}


class TokenBytes(dict[int, bytes]):
    """The bytes of each token: a text is the concatenation of the bytes of its tokens.

    Decoders write U+FFFD for invalid UTF-8, and may leave out spaces before the first character.  Special tokens have
    no bytes.  Entries are made on first use: vocabularies are large, and programs use few of their tokens.

    Args:
        backend: The ``tokenizers.Tokenizer``.
        byte_level: Whether each character of a token represents a byte (GPT-2); else tokens are text, U+2581 is a
            space, and ``<0x0A>`` is a byte (SentencePiece).
    """

    def __init__(self, backend: Any, byte_level: bool) -> None:
        super().__init__()
        self.backend, self._byte_level = backend, byte_level
        added = backend.get_added_tokens_decoder()
        self._special = {token for token, one in added.items() if one.special}

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes | None:
        """The bytes of a transformers tokenizer's tokens; None if its text may differ from their concatenation."""
        backend, kind = getattr(tokenizer, "backend_tokenizer", None), type(tokenizer)
        if backend is None or not _INHERITED.keys().isdisjoint(vars(tokenizer)):
            return None
        if any(getattr(getattr(kind, name, None), "__module__", "") != by for name, by in _INHERITED.items()):
            return None
        if tokenizer.clean_up_tokenization_spaces and _cleans_up(tokenizer, backend):
            return None
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        match decoder:
            case {"type": "ByteLevel"}:
                return cls(backend, byte_level=True)
            case {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, space, *rest]}:
                # transformers 5.17 makes this of a GGUF file: the last decoder maps its one word if all of it is bytes.
                byte_level = [one["type"] for one in rest] == ["ByteLevel"] and space == _SPACE
                return cls(backend, byte_level=True) if byte_level and _all_bytes(backend) else None
            case {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}, *rest]}:
                strips = [one for one in rest if (one.get("type"), one.get("stop")) == ("Strip", 0)]
                return cls(backend, byte_level=False) if space == _SPACE and strips == rest else None
        return None

    def __missing__(self, token: int) -> bytes:
        text = None if token in self._special else self.backend.id_to_token(token)
        self[token] = found = b"" if text is None else self._bytes_of(text)
        return found

    def _bytes_of(self, text: str) -> bytes:
        if self._byte_level:
            bytes_of = _gpt2_bytes()
            return bytes(map(bytes_of.__getitem__, text)) if bytes_of.keys() >= set(text) else text.encode()
        byte = _BYTE.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte else text.replace("\u2581", " ").encode()


def _all_bytes(backend: Any) -> bool:
    """Whether the characters of each token except special ones represent bytes, and no token is ``<0x0A>``."""
    special = {one.content for one in backend.get_added_tokens_decoder().values() if one.special}
    tokens = backend.get_vocab().keys() - special
    return _gpt2_bytes().keys() >= set("".join(tokens)) and not any(map(_BYTE.fullmatch, tokens))


def _cleans_up(tokenizer: Any, backend: Any) -> bool:
    """Whether transformers removes spaces before punctuation from the text, as it does except for BPE."""
    anyway = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return type(backend.model).__name__ != "BPE" or bool(getattr(tokenizer, anyway, True))


@lru_cache(1)
def _gpt2_bytes() -> dict[str, int]:
    """The byte that each character of a byte-level token represents: printable Latin-1 itself, others in order."""
    itself = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    rest = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(rest)}
