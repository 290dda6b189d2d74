"""Samples under grammars by llguidance itself: all valid, and as likely as they should be."""

from __future__ import annotations

import re
import secrets

import pytest

import prefixkit
from prefixkit.integrations import llguidance as grammars
from tests.integrations.constrained import (
    EBNF,
    REGEX,
    SCHEMA,
    assert_drawn_from,
    in_brackets,
    is_valid,
    merging_tokenizer,
    padded_model,
    spellings,
)

PROMPT = list(b"A person as JSON: ")


@pytest.fixture(scope="module")
def tokenizer():
    return merging_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return padded_model(tokenizer)


@pytest.fixture(scope="module")
def session(model, tokenizer):
    with prefixkit.Session(model, tokenizer, kv_budget="16MiB") as session:
        yield session


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (grammars.json_schema(SCHEMA, whitespace=False), is_valid),
        (grammars.regex(REGEX), re.compile(REGEX).fullmatch),
        (grammars.ebnf(EBNF), in_brackets),
    ],
    ids=["json_schema", "regex", "ebnf"],
)
def test_samples_are_of_the_grammar(session, grammar, fits):
    seed = secrets.randbits(32)
    print("seed", seed)
    result = session.generate([PROMPT], grammar=grammar, n=40, max_new_tokens=120, seed=seed)
    ended = [sample for sample in result if sample.finish_reason == "stop"]
    assert len(ended) > 20
    assert all(fits(sample.text) for sample in ended)
    assert result.report.grammar_waits >= result.report.steps > 0


def test_text_that_is_certain_may_be_spelled_by_any_tokens(model, session, tokenizer):
    """As the model would, so that the distribution over texts is the model's."""
    expected = spellings(model, tokenizer, PROMPT, {b"abcabc"}, tokenizer.eos_token_id)
    seed = secrets.randbits(32)
    print("seed", seed)
    fields = {"n": 400, "max_new_tokens": 9, "seed": seed, "logprobs": "sampled"}
    assert_drawn_from(session.generate([PROMPT], grammar=grammars.regex("abcabc"), **fields), expected)


def test_search_nodes_fork_in_the_grammar(session):
    grammar = grammars.regex("[ab]{4}[0-9]{4}")
    root = session.prompt("x")
    session.step(root, grammar=grammar, max_new_tokens=2)
    nodes = session.step(root.fork(4), grammar=grammar)
    assert all(re.fullmatch("[ab]{4}[0-9]{4}", node.text) for node in nodes)


def test_what_is_malformed_is_said_before_anything_runs(session):
    for bad, said in (
        (grammars.regex("a("), "regex is refused by llguidance: .*unclosed group"),
        (grammars.ebnf("root ::= nothing"), "ebnf is refused by llguidance: Rule 'nothing' not found"),
        (grammars.json_schema({"type": "nope"}), "json_schema is refused by llguidance: .*Invalid type: nope"),
    ):
        with pytest.raises(ValueError, match=re.compile(said, re.DOTALL)):
            session.generate([PROMPT], grammar=bad)
    for bad in ("\\", "a\\"):  # it would be left out
        with pytest.raises(ValueError, match="ends with a backslash"):
            grammars.regex(bad)
    assert grammars.regex(r"a\\").text == r"a\\"
