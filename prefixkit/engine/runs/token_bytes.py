"""The bytes that each token of a tokenizer adds to a text, where its decoder only joins them."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
# What transformers' tokenizers inherit: one that overrides these may write anything.
_INHERITED = {"decode": "transformers.tokenization_utils_base", "_decode": "transformers.tokenization_utils_tokenizers"}


class TokenBytes(dict[int, bytes]):
    """The bytes of each token: those of a text are those of its tokens, one after another.

    Invalid UTF-8 is what decoders write U+FFFD for; spaces before the first character may be left out.  Special tokens
    have none.  Tokens are looked up as they are asked for: vocabularies are large, and programs use little of them.

    Args:
        backend: The ``tokenizers.Tokenizer``.
        byte_level: Whether each character of a token stands for a byte (GPT-2), else tokens are text, U+2581 is a
            space, and ``<0x0A>`` a byte (SentencePiece).
    """

    def __init__(self, backend: Any, byte_level: bool) -> None:
        super().__init__()
        self.backend, self._byte_level = backend, byte_level
        added = backend.get_added_tokens_decoder()
        self._special = {token for token, one in added.items() if one.special}

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes | None:
        """Those of a tokenizer of transformers; None where its text may be more than its tokens' bytes."""
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
                # What transformers 5.17 makes of a GGUF: the last decoder sees one word, and maps it if all is bytes.
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
    """Whether the characters of each token, special ones apart, stand for bytes, and no token is ``<0x0A>``."""
    special = {one.content for one in backend.get_added_tokens_decoder().values() if one.special}
    tokens = backend.get_vocab().keys() - special
    return _gpt2_bytes().keys() >= set("".join(tokens)) and not any(map(_BYTE.fullmatch, tokens))


def _cleans_up(tokenizer: Any, backend: Any) -> bool:
    """Whether transformers takes spaces before punctuation out of the text, as it does except for BPE."""
    anyway = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return type(backend.model).__name__ != "BPE" or bool(getattr(tokenizer, anyway, True))


@lru_cache(1)
def _gpt2_bytes() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: printable Latin-1 for itself, others in order."""
    itself = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    rest = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(rest)}
