"""Samples under grammars by llguidance itself: all valid, and as likely as they should be."""

from __future__ import annotations

import re
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


LARGE = [
    ({"type": "integer", "maximum": -(2**70), "minimum": -(2**70) - 4}, "minimum", "#"),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 2}, "minimum", "#"),
    ({"type": "integer", "maximum": -1e25}, "maximum", "#"),
    ({"exclusiveMinimum": 2**53}, "exclusiveMinimum", "#"),
    ({"type": "integer", "exclusiveMaximum": -(2**53)}, "exclusiveMaximum", "#"),
    ({"type": "number", "multipleOf": 1e30}, "multipleOf", "#"),
    ({"properties": {"const": {"anyOf": [{}, {"minimum": 2**60}]}}}, "minimum", "#/properties/const/anyOf/1"),
    ({"const": {"a": [2**53 + 1]}}, "const", "#"),
    ({"items": {"enum": ["a", -(2**70)]}}, "enum", "#/items"),
    ({"$ref": "#/else where", "else where": {"maximum": 2**60}}, "maximum", "#/else where"),
]


@pytest.mark.parametrize("schema, name, path", LARGE)
def test_numbers_that_would_be_rounded_or_end_the_process_are_refused(schema, name, path):
    said = rf"llguidance cannot hold '{name}' at {re.escape(path)}, .* between -2\*\*53 and 2\*\*53"
    with pytest.raises(ValueError, match=said):
        grammars.json_schema(schema)


def test_other_large_numbers_and_bounds_are_taken(session):
    grammars.json_schema({"enum": [{"minimum": 2**53}], "default": {"minimum": 2**60}, "examples": [2**70]})
    schema = {"type": "integer", "exclusiveMinimum": 2**53 - 1, "maximum": 2**53}
    assert session.generate([PROMPT], grammar=grammars.json_schema(schema))[0].text == str(2**53)
