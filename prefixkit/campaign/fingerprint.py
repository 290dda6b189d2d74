"""Whether a tokenizer is that of before."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of what a tokenizer does with text and messages, as far as its files say."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    whole = core.to_str() if core is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    template = getattr(tokenizer, "chat_template", None)
    special = sorted((str(key), str(value)) for key, value in tokenizer.special_tokens_map.items())
    return hashlib.sha256(json.dumps([whole, template, special], default=str).encode()).hexdigest()
