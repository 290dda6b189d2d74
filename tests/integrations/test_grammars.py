"""Samples under grammars of either package: all valid, and the same."""

from __future__ import annotations

import itertools
import random
import re
import runpy
import secrets
import sys

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit.extras import MissingExtra
from prefixkit.integrations import llguidance, xgrammar
from tests.integrations.constrained import (
    EBNF,
    PADDING,
    REGEX,
    SCHEMA,
    in_brackets,
    is_valid,
    padded_model,
)

PROMPTS = [list(b"A person as JSON: "), list(b"Another one: ")]
PACKAGES = pytest.mark.parametrize("package", [xgrammar, llguidance], ids=["xgrammar", "llguidance"])


def seed():
    found = secrets.randbits(32)
    print("seed", found)
    return found


@PACKAGES
@pytest.mark.parametrize(
    ("kind", "text", "fits"),
    [
        ("regex", REGEX, re.compile(REGEX).fullmatch),
        ("ebnf", EBNF, in_brackets),
        ("regex", "[ -~é]{1,9}", re.compile("[ -~é]{1,9}").fullmatch),
    ],
    ids=["regex", "ebnf", "any tokens but special ones and padding"],
)
def test_samples_are_of_the_grammar(package, kind, text, fits, session, tokenizer):
    grammar = getattr(package, kind)(text)
    filters = {"top_p": 0.95, "temperature": 1.2, "repetition_penalty": 1.1}
    result = session.generate(PROMPTS, grammar=grammar, n=40, max_new_tokens=60, seed=seed(), **filters)
    ended = [sample for sample in result if sample.finish_reason == "stop"]
    assert len(ended) > 40
    assert all(fits(sample.text) for sample in ended)
    assert all(token < len(tokenizer) for sample in result for token in sample.tokens)
    assert not any(set(sample.tokens[:-1]) & set(tokenizer.all_special_ids) for sample in result)


@PACKAGES
def test_all_samples_are_json_of_the_schema(package, session):
    grammar = package.json_schema(SCHEMA, whitespace=False)
    result = session.generate(PROMPTS, grammar=grammar, n=60, max_new_tokens=120, seed=seed())
    assert all(is_valid(sample.text) for sample in result)
    assert {sample.finish_reason for sample in result} == {"stop"}
    assert len({sample.text for sample in result}) > 80
    report = result.report
    assert 0 < report.steps <= report.grammar_waits <= report.steps + 2, "one wait a step, and for first tokens"
    assert "grammars allow" in str(report)


@PACKAGES
@pytest.mark.parametrize("end", [3, 90], ids=["end in the vocabulary", "end behind it"])
def test_masks_allow_exactly_the_tokens_that_may_follow(package, end):
    """With tokens of equal bytes, and with many that no text contains."""
    drawn = random.Random(number := seed())
    texts = {"".join(parts).encode() for n in (1, 2, 3) for parts in itertools.product(("ab", "ba", "c"), repeat=n)}
    tokens = ["".join(drawn.choices("abc", k=drawn.randint(1, 4))).encode() for _ in range(90)]
    for empty in {3, *drawn.sample(range(90), 40)}:
        tokens[empty] = b""
    grammar = package.regex("(ab|ba|c){1,3}")
    begin = grammar.compile(grammar.compiler(tokens, end))
    kind, bits = type(begin), np.empty((2, 3), np.int32)
    for _ in range(20):
        matcher, text = begin.fork(), b""
        while True:
            kind.fill([matcher, begin.fork()], [1, 0], bits)
            defined = np.unpackbits(bits[1].view(np.uint8), bitorder="little")[: max(90, end + 1)]
            fit = fitting(tokens, text, texts)
            found, expected = set(np.flatnonzero(defined).tolist()), fit | ({end} if text in texts else set())
            if found != expected and package is xgrammar:
                expected -= left_out(tokens, text, "(ab|ba|c){1,3}")
            assert found == expected, (number, text)
            if not fit:
                break
            kind.accept([matcher], [token := drawn.choice(sorted(fit))])
            text += tokens[token]
    first = fitting(tokens, b"", texts)
    refused = next(token for token, own in enumerate(tokens) if own and token not in first)
    assert list(kind.accept([begin.fork(), begin.fork()], [refused, min(first)])) == [False, True]


def fitting(tokens, text, texts):
    """The tokens after which ``text`` is still the beginning of one of ``texts``."""
    return {token for token, own in enumerate(tokens) if own and any(one.startswith(text + own) for one in texts)}


def left_out(tokens, text, regex):
    """The tokens that the masks of xgrammar 0.2 lack by themselves though it accepts them: one of 300 vocabularies."""
    package = pytest.importorskip("xgrammar")
    info = package.TokenizerInfo([*tokens, b"end"], package.VocabType.RAW, stop_token_ids=[len(tokens)])
    matcher = package.GrammarMatcher(package.GrammarCompiler(info, max_threads=1).compile_regex(regex))
    assert matcher.accept_string(text)
    package_mask = package.allocate_token_bitmask(1, len(tokens) + 1)
    matcher.fill_next_token_bitmask(package_mask)
    bits = np.unpackbits(package_mask.numpy().view(np.uint8), bitorder="little")
    return {token for token, own in enumerate(tokens) if not bits[token] and matcher.fork().accept_token(token)}


@PACKAGES
def test_search_nodes_fork_in_the_grammar(package, session):
    grammar = package.regex("[ab]{4}[0-9]{4}")
    root = session.prompt("x")
    session.step(root, grammar=grammar, max_new_tokens=2)
    nodes = session.step(root.fork(4), grammar=grammar)
    assert all(re.fullmatch("[ab]{4}[0-9]{4}", node.text) for node in nodes)


def test_both_packages_draw_the_same_samples(session):
    fields = {"n": 20, "max_new_tokens": 40, "seed": seed()}
    for kind, text in (("regex", REGEX), ("ebnf", EBNF)):
        ours, theirs = (
            session.generate(PROMPTS, grammar=getattr(package, kind)(text), **fields)
            for package in (xgrammar, llguidance)
        )
        assert [s.tokens for s in ours] == [s.tokens for s in theirs]


@PACKAGES
def test_a_head_may_have_more_tokens_than_the_models_config_or_fewer(package, tokenizer):
    vocab = len(tokenizer) + PADDING
    for width in (vocab + 70, vocab - 32):
        model = padded_model(tokenizer)
        more = model.get_input_embeddings().weight[torch.arange(width) % vocab]
        model.lm_head.weight = torch.nn.Parameter(more)
        options = {"n": 8, "max_new_tokens": 9, "temperature": 5.0, "seed": seed()}
        result = prefixkit.generate(model, tokenizer, PROMPTS, grammar=package.regex("[ab]{2}[0-9]"), **options)
        assert all(re.fullmatch("[ab]{2}[0-9]", sample.text) for sample in result)


@pytest.mark.parametrize(
    ("package", "kind", "text", "said"),
    [
        (xgrammar, "regex", "a(", "regex is refused by xgrammar: Regex parsing error"),
        (xgrammar, "ebnf", "root ::= nothing", 'ebnf is refused by xgrammar: .*"nothing" is not defined'),
        (xgrammar, "json_schema", {"type": "nope"}, 'json_schema is refused by xgrammar: Unsupported type "nope"'),
        (llguidance, "regex", "a(", "regex is refused by llguidance: .*unclosed group"),
        (llguidance, "ebnf", "root ::= nothing", "ebnf is refused by llguidance: Rule 'nothing' not found"),
        (llguidance, "json_schema", {"type": "nope"}, "json_schema is refused by llguidance: .*Invalid type: nope"),
    ],
)
def test_what_is_malformed_is_said_before_anything_runs(package, kind, text, said, session):
    with pytest.raises(ValueError, match=re.compile(said, re.DOTALL)):
        session.stream(PROMPTS, grammar=getattr(package, kind)(text))


@PACKAGES
def test_what_is_no_text_or_schema_is_refused(package):
    with pytest.raises(ValueError, match=r"a regular expression must be text that UTF-8 can encode, .* 'a.ud800'"):
        package.regex("a\ud800")
    with pytest.raises(ValueError, match="must be JSON"):
        package.json_schema("{")
    with pytest.raises(TypeError, match="must be a dict"):
        package.json_schema("[]")


@PACKAGES
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch):
    name = package.__name__.rpartition(".")[2]
    monkeypatch.setitem(sys.modules, name, None)  # as for what is not installed
    with pytest.raises(MissingExtra, match=rf"prefixkit\[{name}\]"):
        runpy.run_path(package.__file__)


def test_a_grammar_is_compiled_once_for_a_tokenizer(session):
    calls = []

    class Counting(xgrammar.XGrammar):
        def compile(self, compiler):
            calls.append(self)
            return super().compile(compiler)

    for _ in range(4):
        session.generate(PROMPTS, grammar=Counting.regex("[ab]{3}"))
    assert len(calls) == 1
