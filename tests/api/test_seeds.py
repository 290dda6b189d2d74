"""Equal seeds give equal samples, whatever is sampled beside them and however it is cut."""

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import BeamParams, Request, SamplingParams
from tests.api.cases import PROMPTS, TOKENIZER, tokens_of

OPTIONS = {"n": 4, "temperature": 0.9, "top_p": 0.95, "max_new_tokens": 8, "seed": 11}


@pytest.fixture(scope="module")
def together(model):
    return prefixkit.generate(model, TOKENIZER, PROMPTS, **OPTIONS)


def occurrences(prompts):
    """For each prompt how many equal ones stand before it."""
    return [prompts[:index].count(prompt) for index, prompt in enumerate(prompts)]


def test_together_or_alone(model, together):
    for index, (prompt, before) in enumerate(zip(PROMPTS, occurrences(PROMPTS), strict=True)):
        alone = prefixkit.generate(model, TOKENIZER, [prompt] * (before + 1), **OPTIONS)
        assert [s.tokens for s in alone.of_prompt(before)] == [s.tokens for s in together.of_prompt(index)]


def test_in_another_order(model, together):
    backward = prefixkit.generate(model, TOKENIZER, PROMPTS[::-1], **OPTIONS)
    place = {key: i for i, key in enumerate(zip(PROMPTS[::-1], occurrences(PROMPTS[::-1]), strict=True))}
    for index, key in enumerate(zip(PROMPTS, occurrences(PROMPTS), strict=True)):
        other = backward.of_prompt(place[key])
        assert [s.tokens for s in other] == [s.tokens for s in together.of_prompt(index)]


@pytest.mark.parametrize("page_size", [1, 5, 64, 128])
def test_with_another_page_size(model, page_size, together):
    paged = prefixkit.generate(model, TOKENIZER, PROMPTS, page_size=page_size, **OPTIONS)
    assert tokens_of(paged) == tokens_of(together)


def test_with_a_budget_that_makes_prompts_wait(model, together):
    bytes_per_token = 2 * 2 * 2 * 16 * 4
    budget = 160 * bytes_per_token
    assert together.report.kv_bytes_held_peak > budget
    tight = prefixkit.generate(model, TOKENIZER, PROMPTS, kv_budget=budget, **OPTIONS)
    assert tokens_of(tight) == tokens_of(together)
    assert tight.report.kv_bytes_held_peak <= budget
    assert tight.report.tokens_computed == together.report.tokens_computed


def test_in_small_prefill_chunks(model, together):
    chunked = prefixkit.generate(model, TOKENIZER, PROMPTS, prefill_chunk=13, **OPTIONS)
    assert tokens_of(chunked) == tokens_of(together)


def test_asking_for_more_samples_changes_none(model):
    few = prefixkit.generate(model, TOKENIZER, PROMPTS[:1], **{**OPTIONS, "n": 2})
    many = prefixkit.generate(model, TOKENIZER, PROMPTS[:1], **{**OPTIONS, "n": 6})
    assert tokens_of(few) == tokens_of(many)[:2]


def test_one_seed_per_prompt(model):
    options = {**OPTIONS, "seed": [1, 2]}
    both = prefixkit.generate(model, TOKENIZER, [PROMPTS[0], PROMPTS[0]], **options)
    second = prefixkit.generate(model, TOKENIZER, [PROMPTS[0]] * 2, **{**options, "seed": 2})
    assert [s.tokens for s in both.of_prompt(1)] == [s.tokens for s in second.of_prompt(1)]
    assert [s.tokens for s in both.of_prompt(0)] != [s.tokens for s in second.of_prompt(0)]


def test_equal_prompts_get_different_samples(model):
    twice = prefixkit.generate(model, TOKENIZER, [PROMPTS[0], PROMPTS[2], PROMPTS[0]], **OPTIONS)
    first, second = ([s.tokens for s in twice.of_prompt(index)] for index in (0, 2))
    assert not any(tokens in second for tokens in first)


def test_the_first_of_equal_prompts_gets_what_it_would_alone(model):
    twice = prefixkit.generate(model, TOKENIZER, [PROMPTS[0]] * 2, **OPTIONS)
    alone = prefixkit.generate(model, TOKENIZER, PROMPTS[0], **OPTIONS)
    assert [s.tokens for s in twice.of_prompt(0)] == [s.tokens for s in alone]


def test_prompts_are_equal_by_their_tokens(model):
    ids = TOKENIZER(PROMPTS[0])["input_ids"]
    as_text = prefixkit.generate(model, TOKENIZER, [PROMPTS[0]] * 2, **OPTIONS)
    mixed = prefixkit.generate(model, TOKENIZER, [PROMPTS[0], np.array(ids)], **OPTIONS)
    assert tokens_of(mixed) == tokens_of(as_text)


@pytest.fixture(scope="module")
def two_prompts(model):
    return prefixkit.generate(model, TOKENIZER, PROMPTS[:2], **OPTIONS)


@pytest.fixture(scope="module")
def two_seeds(model):
    return prefixkit.generate(model, TOKENIZER, PROMPTS[:2], **{**OPTIONS, "seed": [3, 4]})


@pytest.mark.parametrize("seed", [np.int64(11), np.uint8(11), np.array(11), torch.tensor(11)])
def test_any_integer_is_a_seed(model, seed, two_prompts):
    other = prefixkit.generate(model, TOKENIZER, PROMPTS[:2], **{**OPTIONS, "seed": seed})
    assert tokens_of(other) == tokens_of(two_prompts)


@pytest.mark.parametrize("seeds", [(3, 4), np.array([3, 4]), [np.int32(3), np.int64(4)], torch.tensor([3, 4])])
def test_one_seed_per_prompt_in_any_sequence(model, seeds, two_seeds):
    other = prefixkit.generate(model, TOKENIZER, PROMPTS[:2], **{**OPTIONS, "seed": seeds})
    assert tokens_of(other) == tokens_of(two_seeds)


def test_some_samples_of_a_prompt_are_those_of_all(model, together):
    """What a campaign asks for that goes on where it was stopped."""
    encoded = [np.array(TOKENIZER(prompt)["input_ids"]) for prompt in PROMPTS]
    wanted = [(3,), (0, 2), range(1, 4)]
    params = SamplingParams(**OPTIONS)
    asked = list(zip(encoded, occurrences(PROMPTS), wanted, strict=False))
    requests = [Request(index, tokens, params, before, own) for index, (tokens, before, own) in enumerate(asked)]
    with prefixkit.Session(model, TOKENIZER, kv_budget="4MiB", most_running=2) as session:
        found = session.run(requests)
    expected = [together.of_prompt(index)[one].tokens for index, own in enumerate(wanted) for one in own]
    assert [sample.tokens for sample in found] == expected
    assert [sample.index for sample in found] == [one for own in wanted for one in own]


@pytest.mark.parametrize("indices", [(), (1, 1), (2, 0), (-1,), range(0)])
def test_indices_are_ascending_and_there_are_some(indices):
    with pytest.raises(ValueError, match=r"prompt 0: indices must be ascending|must be at least 0"):
        Request(0, [1], SamplingParams(), indices=indices)
    with pytest.raises(ValueError, match="beams have none"):
        Request(0, [1], BeamParams(2), indices=[0])
