"""Samples under grammars by llguidance itself: all valid, and as likely as they should be."""

from __future__ import annotations

import secrets

import pytest

from prefixkit.integrations import llguidance as grammars
from tests.integrations.constrained import (
    assert_drawn_from,
    spellings,
)

PROMPT = list(b"A person as JSON: ")


def test_text_that_is_certain_may_be_spelled_by_any_tokens(model, session, tokenizer):
    """As the model would, so that the distribution over texts is the model's."""
    expected = spellings(model, tokenizer, PROMPT, {b"abcabc"}, tokenizer.eos_token_id)
    seed = secrets.randbits(32)
    print("seed", seed)
    fields = {"n": 400, "max_new_tokens": 9, "seed": seed, "logprobs": "sampled"}
    assert_drawn_from(session.generate([PROMPT], grammar=grammars.regex("abcabc"), **fields), expected)


def test_a_backslash_that_escapes_nothing_is_refused():
    for bad in ("\\", "a\\"):  # it would be left out
        with pytest.raises(ValueError, match="ends with a backslash"):
            grammars.regex(bad)
    assert grammars.regex(r"a\\").text == r"a\\"
