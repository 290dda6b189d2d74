"""What the API returns says what it is in one short line, without the numbers that it holds."""

import re

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import variants
from prefixkit.testing.tiny import ByteTokenizer, tiny_llama

PROMPTS = ["def one():", "def two():"]


@pytest.fixture(scope="module")
def session():
    with prefixkit.Session(prefixkit.patch(tiny_llama()), ByteTokenizer(), kv_budget="1MiB") as session:
        yield session


@pytest.fixture(scope="module")
def results(session):
    """Of each kind of object that calls return, one, and how it is written."""
    result = session.generate(PROMPTS, n=3, max_new_tokens=90)
    events = []
    session.generate("x", max_new_tokens=1, on_token=events.append)
    beams = session.beam_search("x", num_beams=2, max_new_tokens=2)
    stream, pin, node = session.stream("a"), session.pin(PROMPTS[0]), session.prompt("abc")
    return [
        (session, r"Session\(LlamaForCausalLM, KVStore\(\d+ of \d+ pages of 16 tokens free, 2 layers of .+ on cpu\)\)"),
        (result, r"Result\(6 samples of 2 prompts, \d+ new tokens in \d+\.\d s: [\d,]+ tokens/s\)"),
        (result[0], r"Sample\(prompt_index=0, index=0, \d+ tokens, text='.*', finish_reason='\w+'\)"),
        (beams[0], r"Sample\(.+, score=-[\d.]+\)"),
        (result.report, r"Report\(6 samples .+\)"),
        (session.score("ab", ["cd"])[0], r"Score\(2 tokens, total=-[\d.]+, is_greedy=(True|False)\)"),
        (events[0], r"TokenEvent\(prompt_index=0, index=0, token=\d+, .+\)"),
        (stream, r"Stream\(not begun\)"),
        (pin, r"Pin\(10 tokens\)"),
        (node, r"SearchNode\(3 tokens, seed=0, finish_reason=None\)"),
        (prefixkit.TreeCache(session.model), r"TreeCache\(0 rows of 0 tokens\)"),
    ]


def given():
    """Of each kind of object that users make, or get of functions for models of their own."""
    pool = prefixkit.kv_pool(2, 2, 16, 30, 4, torch.float32, "cpu")
    tree, sequences = prefixkit.tree_from_tokens(pool, [list(range(50)), list(range(40))])
    attention = prefixkit.TreeAttention(pool, 4)
    pages = torch.zeros(30, 2, 4, 2, 16)
    spec = r"2 layers of .+ on cpu"
    return [
        (pool, rf"KVPool\(30 pages of 4 tokens, {spec}\)"),
        (prefixkit.kv_pool_from_tensors([pages, pages]), rf"GivenPages\(30 pages of 4 tokens, {spec}\)"),
        (tree, r"PrefixTree\(2 sequences, 17 of 30 pages of 4 tokens free\)"),
        (tree.snapshot(), r"TreeSnapshot\(2 nodes, 2 sequences, page_size=4\)"),
        (tree.nodes()[0], r"Node\(id=\d+, positions=\[0, 40\), computed=0, 1 sequences\)"),
        (sequences[0], r"Sequence\(id=0, length=50\)"),
        (attention, r"TreeAttention\(pool=KVPool\(.+\), num_qo_heads=4, variant=Variant\('causal'\), scale=None\)"),
        (prefixkit.plan(attention, tree, sequences), r"TreeStep\(50 rows, 2 sequences, TreeAttention\(.+\)\)"),
        (variants.document(torch.zeros(500, dtype=torch.long)), r"Variant\('document\(500 positions\)'\)"),
        (prefixkit.SamplingParams(n=4, top_p=0.5), r"SamplingParams\(n=4, top_p=0\.5\)"),
        (prefixkit.BeamParams(3), r"BeamParams\(num_beams=3, .+\)"),
        (prefixkit.MemoryPolicy(), r"MemoryPolicy\(.+\)"),
        (
            prefixkit.Request(1, np.arange(900), prefixkit.SamplingParams(n=9), indices=[3, 5], priority=2),
            r"Request\(prompt_index=1, 900 tokens, 2 samples, SamplingParams\(n=9\), priority=2\)",
        ),
    ]


def test_what_calls_return_is_written_in_one_short_line(results):
    check(results)


def test_what_models_of_ones_own_use_is_written_in_one_short_line():
    check(given())


def check(written):
    for one, form in written:
        assert re.fullmatch(form, repr(one)), repr(one)
        assert len(repr(one)) <= 250 and "array(" not in repr(one) and "tensor(" not in repr(one)


def test_long_texts_and_ends_of_things_are_seen(session):
    sample = prefixkit.Sample(0, 0, [1] * 500, [-1.0] * 500, "a\n" * 500, "length")
    assert "500 tokens, text='a\\na" in repr(sample) and len(repr(sample)) < 200
    pin = session.pin("xy")
    pin.release()
    assert repr(pin) == "Pin(2 tokens, released)"
    stream = session.stream("a", max_new_tokens=1)
    list(stream)
    assert repr(stream) == "Stream(ended)"
    with prefixkit.Session(session.model, kv_budget="1MiB") as other:
        pass
    assert repr(other) == "Session(LlamaForCausalLM, memory released)"


def test_grammars_are_written_by_their_beginning():
    llguidance = pytest.importorskip("prefixkit.integrations.llguidance", exc_type=ImportError)
    params = prefixkit.SamplingParams(grammar=llguidance.regex("ab" * 500))
    assert re.fullmatch(r"SamplingParams\(grammar=LLGrammar\(regex, '(ab)+a…'\)\)", repr(params))
    assert repr(llguidance.json_schema({}, whitespace=False)) == "LLGrammar(json_schema, '{}', no whitespace)"


def test_parameters_are_written_as_they_can_be_given_again():
    for params in (prefixkit.SamplingParams(), prefixkit.SamplingParams(n=3, temperature=0.2, stop=["\n"], seed=5)):
        assert eval(repr(params), {"SamplingParams": prefixkit.SamplingParams}) == params
