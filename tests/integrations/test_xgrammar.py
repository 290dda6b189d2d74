"""Samples under grammars by xgrammar itself: all valid, as likely as they should be, wherever they fork or wait."""

from __future__ import annotations

import json
import re
import secrets

import pytest
import torch
import xgrammar

import prefixkit
from prefixkit.engine.policy import MemoryPolicy
from prefixkit.integrations import xgrammar as grammars
from prefixkit.testing.tiny import ByteTokenizer
from tests.integrations.constrained import (
    PADDING,
    REGEX,
    SCHEMA,
    assert_drawn_from,
    is_valid,
    merging_tokenizer,
    spellings,
)

PROMPTS = [list(b"A person as JSON: "), list(b"Another one: ")]


def seed():
    found = secrets.randbits(32)
    print("seed", found)
    return found


def test_samples_are_drawn_from_the_models_distribution_over_what_may_follow(model, session, tokenizer):
    grammar, prompt = grammars.regex("(abc|ab|b)c?[12]{0,2}"), PROMPTS[0]
    digits = ["", *"12", "11", "12", "21", "22"]
    texts = {(a + c + d).encode() for a in ("abc", "ab", "b") for c in ("", "c") for d in digits}
    expected = spellings(model, tokenizer, prompt, texts, tokenizer.eos_token_id)
    drawn = {"logprobs": "sampled", "n": 700, "max_new_tokens": 9, "seed": seed()}
    result = session.generate([prompt], grammar=grammar, **drawn)
    assert_drawn_from(result, expected)
    assert {mass for sample in result for mass in sample.masses} == {1.0}, "no filter takes any"


def test_a_text_of_one_token_is_drawn_as_by_rejection(model, session):
    """What is not of the grammar is drawn again: the model's own probabilities, renormalised."""
    prompt, may = PROMPTS[0], sorted(merging_tokenizer().convert_tokens_to_ids(list("abcdefghij")))
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].double()
    expected = {(token,): share for token, share in zip(may, logits[may].softmax(-1).tolist(), strict=True)}
    fields = {"n": 800, "max_new_tokens": 1, "stop_token_ids": (), "seed": seed(), "logprobs": "sampled"}
    assert_drawn_from(session.generate([prompt], grammar=grammars.regex("[a-j]"), **fields), expected)


def test_rows_without_a_grammar_are_unaffected(session):
    free = prefixkit.SamplingParams(n=3, max_new_tokens=12, seed=1, stop_token_ids=())
    held = prefixkit.SamplingParams(n=3, max_new_tokens=12, seed=1, grammar=grammars.regex("[ab]*"))
    alone = session.generate(PROMPTS[:1], free)
    mixed = session.generate(PROMPTS[:1] * 2, [free, held])
    assert [s.tokens for s in mixed.of_prompt(0)] == [s.tokens for s in alone]
    for ours, theirs in zip(mixed.of_prompt(0), alone, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert all(re.fullmatch("[ab]*", sample.text) for sample in mixed.of_prompt(1))


def test_preempted_samples_are_those_without_pressure(model, tokenizer, session):
    grammar = grammars.json_schema(SCHEMA, whitespace=False)
    fields = {"grammar": grammar, "n": 8, "max_new_tokens": 90, "seed": seed()}
    expected = session.generate(PROMPTS, **fields)
    policy = MemoryPolicy(preemption="recompute", headroom=4)
    with prefixkit.Session(model, tokenizer, kv_budget="96KiB", memory=policy) as small:
        found = small.generate(PROMPTS, **fields)
    assert found.report.preempted_recomputed > 0
    assert [s.tokens for s in found] == [s.tokens for s in expected]


def test_search_nodes_fork_in_the_grammar_and_go_on_by_given_text(session):
    grammar = grammars.json_schema(SCHEMA, whitespace=False)
    root = session.prompt("A person: ")
    session.step(root, grammar=grammar, max_new_tokens=3)
    nodes = root.fork(6)
    while growing := [node for node in nodes if node.finish_reason != "stop"]:
        session.step(growing, grammar=grammar, max_new_tokens=7)
    assert all(is_valid(node.text) for node in nodes)
    assert len({node.text for node in nodes}) > 3
    forced = session.prompt("A person: ")
    session.step(forced, grammar=grammar, max_new_tokens=1)
    forced.extend('{"name":"Ann","age":7,'[len(forced.text) :])
    spoilt = forced.fork(1)[0].extend("nonsense")
    before = (spoilt.tokens, forced.tokens)
    with pytest.raises(ValueError, match=r"does not allow token .* after its first 1[0-9] tokens"):
        session.step([forced, spoilt], grammar=grammar, max_new_tokens=80)
    assert (spoilt.tokens, forced.tokens) == before
    session.step(forced, grammar=grammar, max_new_tokens=80)
    assert is_valid(forced.text) and forced.text.startswith('{"name":"Ann","age":7,"tags":[')


def test_a_grammar_begins_where_a_node_first_steps_with_it(session):
    node = session.prompt("x").extend("Digits: ")
    session.step(node, grammar=grammars.regex("[0-9]{3}"), stop_token_ids=())
    assert re.fullmatch("Digits: [0-9]{3}", node.text)
    assert node.finish_reason == "until", "the grammar is finished, and the node goes on"
    session.step(node.extend(", letters: "), grammar=grammars.regex("[a-c]{2}"))
    assert re.fullmatch("Digits: [0-9]{3}, letters: [a-c]{2}", node.text)
    assert node.finish_reason == "stop"


def test_a_dead_end_ends_its_sample_alone(session):
    """No token is left where the model's logits leave none of those that are allowed."""
    digits = merging_tokenizer().convert_tokens_to_ids(list("0123456789"))

    def without_digits(ids, logits):
        return logits.index_fill(1, torch.tensor(digits), -torch.inf)

    dead = prefixkit.SamplingParams(
        n=2, grammar=grammars.regex("[ab][3-9]"), logits_processors=lambda: without_digits, max_new_tokens=5
    )
    fine = prefixkit.SamplingParams(n=2, grammar=grammars.regex("[ab]c"), max_new_tokens=5)
    result = session.generate(PROMPTS, [dead, fine])
    assert [(len(s.tokens), s.finish_reason) for s in result.of_prompt(0)] == [(1, "dead_end")] * 2
    assert [s.finish_reason for s in result.of_prompt(1)] == ["stop"] * 2
    assert all(s.text in ("a", "b") for s in result.of_prompt(0))
    assert all(s.text in ("ac", "bc") for s in result.of_prompt(1))


def test_a_models_own_generate_takes_xgrammars_logits_processor(model, tokenizer):
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer) + PADDING)
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_regex(REGEX)
    torch.manual_seed(seed())
    rows = model.generate(
        torch.tensor(PROMPTS[:1]),
        do_sample=True,
        num_return_sequences=4,
        max_new_tokens=20,
        logits_processor=[xgrammar.contrib.hf.LogitsProcessor(compiled)],
    )
    for row in rows:
        assert re.fullmatch(REGEX, tokenizer.decode(row[len(PROMPTS[0]) :], skip_special_tokens=True))


def test_what_is_wrong_is_said_before_anything_runs(model, tokenizer, session):
    grammar = grammars.regex("a")
    with pytest.raises(ValueError, match="tokenizer is None; pass the model's tokenizer"):
        prefixkit.generate(model, None, PROMPTS, grammar=grammar)
    with pytest.raises(ValueError, match="not known of ByteTokenizer"):
        prefixkit.generate(model, ByteTokenizer(), PROMPTS, grammar=grammar)
    with pytest.raises(TypeError, match="grammar must be a grammar, got str"):
        session.generate(PROMPTS, grammar="[a]")
    with pytest.raises(TypeError, match="no parameter is named 'grammar'; the fields of BeamParams"):
        session.beam_search(PROMPTS, num_beams=2, grammar=grammar)
    with pytest.raises(ValueError, match="xgrammar leaves out 'not' at #"):
        grammars.json_schema('{"not": {}}')


def test_escapes_that_would_be_letters_are_refused():
    for bad, part in ((r"\Ax", r"\A"), (r"x\Z", r"\Z"), (r"\\x\z", r"\z"), (r"[\h]", r"\h")):
        with pytest.raises(ValueError, match=re.escape(f"regex: xgrammar reads {part!r} as a letter in {bad!r}")):
            grammars.regex(bad)
    assert grammars.regex(r"\\Ax\d\x41").text == r"\\Ax\d\x41"


def test_strings_of_a_pattern_are_json_although_classes_have_what_json_escapes(session):
    schema = {"type": "string", "pattern": r"^[ -~]{3}[\"\\!][ -~\n][\x00-!]$"}
    result = session.generate(PROMPTS, grammar=grammars.json_schema(schema), n=40, max_new_tokens=60, seed=seed())
    for sample in result:
        if sample.finish_reason == "stop":
            assert re.fullmatch(schema["pattern"], json.loads(sample.text)), sample.text
