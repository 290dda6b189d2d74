"""Stop strings end a sample, and may hold special tokens."""

import pytest

import prefixkit
from prefixkit.testing.tiny import EOS, byte_tokenizer
from tests.api.cases import PROMPTS, TOKENIZER

# Random weights sample the end token often enough; here it ends no sample by itself.
OPTIONS = {"n": 20, "max_new_tokens": 40, "temperature": 1.3, "seed": 2, "stop_token_ids": ()}


def test_stop_strings_end_the_text(model):
    plain = prefixkit.generate(model, TOKENIZER, PROMPTS, n=2, max_new_tokens=24, seed=1)
    letters = {sample.text[5] for sample in plain if len(sample.text) > 5}
    stop = sorted(letters)[0]
    cut = prefixkit.generate(model, TOKENIZER, PROMPTS, n=2, max_new_tokens=24, seed=1, stop=stop)
    for before, after in zip(plain, cut, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert after.tokens == before.tokens[: len(after.tokens)]


def test_none_is_no_stop_string(model):
    plain = prefixkit.generate(model, TOKENIZER, PROMPTS[:2], max_new_tokens=8)
    assert list(prefixkit.generate(model, TOKENIZER, PROMPTS[:2], max_new_tokens=8, stop=None)) == list(plain)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def ended(model, tokenizer):
    """Samples without the end token as a stop string and with it, of those that hold the end token."""
    plain = prefixkit.generate(model, tokenizer, "while True:", **OPTIONS)
    cut = prefixkit.generate(model, tokenizer, "while True:", stop="<|end|>", **OPTIONS)
    pairs = [(before, after) for before, after in zip(plain, cut, strict=True) if EOS in before.tokens]
    assert pairs, "no sample has the end token; take another seed"
    return pairs


def test_one_that_is_a_special_token_ends_a_sample(tokenizer, ended):
    for before, after in ended:
        assert after.tokens == before.tokens[: before.tokens.index(EOS) + 1]
        assert after.finish_reason == "stop"
        assert after.text == tokenizer.decode(after.tokens, skip_special_tokens=True)


def test_one_that_holds_a_special_token_is_found_across_it(model, tokenizer, ended):
    for before, _ in ended:
        at = before.tokens.index(EOS)
        raw = tokenizer.decode(before.tokens[: at + 2])
        if at and "\ufffd" not in raw:
            break
    begin = len(raw) - len("<|end|>") - 2
    stop = raw[begin:]
    after = prefixkit.generate(model, tokenizer, "while True:", stop=stop, **OPTIONS)[before.index]
    assert stop.startswith(raw[begin]) and "<|end|>" in stop
    assert (after.tokens, after.text) == (before.tokens[: at + 2], raw[:begin])
    assert after.finish_reason == "stop"


def test_text_has_no_special_tokens(model, tokenizer):
    for sample in prefixkit.generate(model, tokenizer, "while True:", stop=["<|pad|>never"], **OPTIONS):
        assert "<|end|>" not in sample.text
