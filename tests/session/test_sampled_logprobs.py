"""``SamplingParams(logprobs="sampled")``: with which probability tokens were sampled, and what filters left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import prefixkit
from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.request import BeamParams, Request
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.tiny import byte_tokenizer, tiny_llama

PROMPTS = [list(range(10, 40)), [*range(10, 35), 99]]
FILTERED = SamplingParams(
    n=3, temperature=0.8, top_p=0.9, max_new_tokens=9, stop_token_ids=(), seed=4, logprobs="sampled"
)


@pytest.fixture(scope="module")
def model():
    return prefixkit.patch(tiny_llama(initializer_range=0.15))


@pytest.fixture
def session(model):
    with prefixkit.Session(model, byte_tokenizer(), kv_budget="4MiB") as session:
        yield session


def distributions(model, prompt, sample, temperature):
    """``[tokens, vocab]`` the model's probabilities at a temperature before each token of a sample, in float64."""
    ids = torch.tensor([[*prompt, *sample.tokens]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).softmax(-1)


def nucleus(probabilities, top_p):
    """Which tokens of each row are the fewest likeliest ones that hold ``top_p``."""
    ordered, order = probabilities.sort(-1, descending=True)
    left = ordered.cumsum(-1) - ordered < top_p
    return torch.zeros_like(left).scatter(-1, order, left)


def test_they_are_of_what_temperature_and_filters_left_and_masses_are_what_that_holds(model, session):
    result = session.generate(PROMPTS, FILTERED)
    assert len(result) == 6
    for sample in result:
        all_of = distributions(model, PROMPTS[sample.prompt_index], sample, 0.8)
        left = nucleus(all_of, 0.9)
        masses = (all_of * left).sum(-1)
        own = all_of[torch.arange(9), torch.tensor(sample.tokens)]
        np.testing.assert_allclose(sample.masses, masses, rtol=1e-5)
        np.testing.assert_allclose(sample.logprobs, (own / masses).log(), atol=1e-5)
        assert all(0.9 <= mass < 1 for mass in sample.masses)


def test_the_samples_are_those_that_come_without(session):
    own = session.generate(PROMPTS, FILTERED)
    plain = session.generate(PROMPTS, FILTERED, logprobs="model")
    assert [sample.tokens for sample in own] == [sample.tokens for sample in plain]
    assert all(sample.masses is None for sample in plain)
    assert plain[0].logprobs != own[0].logprobs


def test_where_nothing_is_filtered_they_are_the_models(session):
    params = {"n": 2, "temperature": 1.0, "max_new_tokens": 5, "stop_token_ids": ()}
    own, plain = (session.generate(PROMPTS, **params, logprobs=kind) for kind in ("sampled", "model"))
    for one, other in zip(own, plain, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)  # known KV rounds otherwise
    assert all(sample.masses == [1.0] * 5 for sample in own)


def test_greedy_tokens_are_sampled_for_certain(session):
    (sample,) = session.generate(PROMPTS[:1], temperature=0, max_new_tokens=4, logprobs="sampled")
    assert sample.logprobs == [0.0] * len(sample.tokens) and sample.masses == [1.0] * len(sample.tokens)


def test_logits_processors_count(session):
    def halved():
        return LogitsProcessorList([TemperatureLogitsWarper(2.0)])

    params = {"n": 2, "max_new_tokens": 5, "stop_token_ids": (), "logprobs": "sampled"}
    own = session.generate(PROMPTS, **params, temperature=1.0, logits_processors=halved)
    same = session.generate(PROMPTS, **params, temperature=2.0)
    assert [sample.tokens for sample in own] == [sample.tokens for sample in same]
    for one, other in zip(own, same, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-6)


def test_beside_other_samples_and_beams_each_has_what_it_asked_for(session):
    tokens = [np.array(prompt, np.int32) for prompt in PROMPTS]
    plain = SamplingParams(n=2, temperature=0.8, max_new_tokens=12, stop_token_ids=())
    beams = BeamParams(num_beams=3, max_new_tokens=6, stop_token_ids=())
    requests = [Request(0, tokens[0], FILTERED), Request(1, tokens[1], plain), Request(2, tokens[1], beams)]
    together = session.run(requests)
    alone = [sample for request in requests for sample in session.run([request])]
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.masses is None) == (other.masses is None) == (one.prompt_index != 0)
        if one.masses is not None:
            np.testing.assert_allclose(one.masses, other.masses, atol=1e-6)


@pytest.mark.parametrize("kinds", [("sampled", "model", "model"), ("model", "model", "sampled")])
def test_a_sample_keeps_its_own_in_batches_with_such_samples_and_without(model, session, kinds):
    """Two run at a time: the second is in a batch with the first, and then with the third."""
    limits = zip(kinds, (3, 12, 9), strict=True)
    each = [replace(FILTERED, n=1, logprobs=kind, max_new_tokens=limit) for kind, limit in limits]
    requests = [Request(index, [5 + index, 6, 7], params) for index, params in enumerate(each)]
    with prefixkit.Session(model, kv_budget="4MiB", most_running=2) as pairs:
        together = sorted(pairs.run(requests), key=lambda one: one.prompt_index)
    for one, request in zip(together, requests, strict=True):
        (alone,) = session.run([request])
        assert one.tokens == alone.tokens
        np.testing.assert_allclose(one.logprobs, alone.logprobs, atol=1e-5)
        assert (one.masses is None) == (kinds[one.prompt_index] == "model")


def test_a_preempted_sample_keeps_its_own(model, session):
    params = {"n": 6, "max_new_tokens": 60}
    calm = session.generate(PROMPTS, FILTERED, **params)
    policy = MemoryPolicy("lru", "swap", 4)
    with prefixkit.Session(model, byte_tokenizer(), kv_budget="72KiB", page_size=4, memory=policy) as small:
        result = small.generate(PROMPTS, FILTERED, **params)
    assert result.report.preempted_swapped + result.report.preempted_recomputed > 0
    assert [sample.tokens for sample in result] == [sample.tokens for sample in calm]
    for one, other in zip(result, calm, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        np.testing.assert_allclose(one.masses, other.masses, atol=1e-5)


def test_events_have_them_too(session):
    events = []
    (sample,) = session.generate(PROMPTS[:1], FILTERED, n=1, on_token=events.append)
    assert [event.logprob for event in events] == sample.logprobs


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="logprobs must be 'model' or 'sampled', got 'both'"):
        SamplingParams(logprobs="both")
