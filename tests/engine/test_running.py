"""Steps launched ahead over a tree that stands still: the same samples as step by step, and every page given back."""

from itertools import product

import numpy as np
import pytest
import torch

from prefixkit.engine.request import BeamParams, Request
from prefixkit.engine.runs.detokenizer import Detokenizer
from prefixkit.runners.batch import Pace
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, assert_all_given_back, random_prompts, run
from prefixkit.testing.fake_model import make_engine
from tests.covering import pairwise_cover

AHEAD = (1, 2, 5)


@pytest.fixture(params=AHEAD, ids="{} ahead".format)
def ahead(request):
    """Steps that are started before their tokens are read."""
    return request.param


@pytest.fixture
def decoding(ahead):
    """Makes an engine that launches steps ahead of the tokens read, and its fake model."""

    def make(slack=16, **options):
        return make_engine(pace=Pace(ahead, slack, waited_for=8), **options)

    return make


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("ahead", "slack", "seed", "page_size"),
    [(a, slack, *of) for a, slack, of in pairwise_cover(product(AHEAD, (1, 4, 10_000), ((0, 1), (1, 3), (2, 16))))],
    indirect=["ahead"],
)
def test_each_sample_is_what_it_would_be_alone(decoding, seed, page_size, slack):
    params = SamplingParams(n=3, temperature=0.9, top_p=0.9, max_new_tokens=12, seed=seed, stop_token_ids=(3, 4))
    prompts = random_prompts(seed)
    made, _ = decoding(slack=slack, page_size=page_size, prefill_chunk=20)
    samples = run(made, prompts, params)
    assert [(s.prompt_index, s.index) for s in samples] == [(p, i) for p in range(len(prompts)) for i in range(3)]
    for sample in samples:
        assert sample.tokens == alone(prompts[sample.prompt_index], params, sample.index)
        assert sample.finish_reason == ("stop" if sample.tokens[-1] in (3, 4) else "length")
        assert len(sample.logprobs) == len(sample.tokens)
    assert_all_given_back(made)


def test_log_probabilities_and_counts_are_those_of_single_steps(decoding):
    params, prompts = SamplingParams(n=4, max_new_tokens=9, seed=3), random_prompts(4)
    step_by_step, _ = make_engine()
    many, _ = decoding()
    expected, found = run(step_by_step, prompts, params), run(many, prompts, params)
    assert [s.logprobs for s in found] == [s.logprobs for s in expected]
    ours, theirs = vars(many.report), vars(step_by_step.report)
    for name in theirs.keys() - {"seconds", "seconds_in_decode", "plans"}:
        assert ours[name] == theirs[name], name
    assert ours["plans"] <= theirs["plans"]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("num_pages", [13, 20, 60])
def test_those_who_wait_for_pages_come_in_when_some_have_ended(decoding, num_pages):
    params = SamplingParams(n=4, max_new_tokens=8, seed=5, stop_token_ids=(1, 2, 3, 4, 5))
    prompts = random_prompts(1)
    made, _ = decoding(num_pages=num_pages, page_size=4)
    samples = run(made, prompts, params)
    assert [s.tokens for s in samples] == [alone(prompts[s.prompt_index], params, s.index) for s in samples]
    assert made.report.kv_bytes_held_peak <= num_pages * 4 * made.store.pool.spec.bytes_per_token
    assert_all_given_back(made)


def test_samples_are_handed_out_as_they_end_and_their_rows_closed_up(decoding, ahead):
    arrived = []
    made, model = decoding(slack=1000, on_sample=lambda sample: arrived.append(sample))
    params = SamplingParams(n=16, max_new_tokens=12, stop_token_ids=tuple(range(8)), seed=2)
    samples = run(made, [np.arange(20)], params)
    lengths = sorted(len(sample.tokens) for sample in samples)
    assert lengths[0] < lengths[-1]
    assert [len(sample.tokens) for sample in arrived] == lengths
    lags = ahead - 1
    running = [sum(n > step for n in lengths) for step in range(1, lengths[-1])]
    late = model.rows_per_step[1 : len(running) + 1]
    assert late[0] == running[0]
    assert all(rows <= running[max(0, step - lags)] for step, rows in enumerate(late))


def test_stop_strings_end_samples_and_tokens_stream_in_order(decoding):
    events = []
    decode = lambda tokens: "".join(chr(97 + token % 26) for token in tokens)  # noqa: E731
    params = SamplingParams(n=2, max_new_tokens=15, stop=("ab", "q"))
    made, _ = decoding(detokenizer=Detokenizer(decode), on_token=events.append)
    samples = run(made, [np.arange(5), np.arange(7)], params)
    plain, _ = make_engine(detokenizer=Detokenizer(decode))
    assert samples == run(plain, [np.arange(5), np.arange(7)], params)
    for sample in samples:
        mine = [e for e in events if (e.prompt_index, e.index) == (sample.prompt_index, sample.index)]
        assert [event.token for event in mine] == sample.tokens
        assert "".join(event.text for event in mine) == sample.text


def test_parameters_may_differ_and_beams_run_beside(decoding):
    params = [
        SamplingParams(n=2, temperature=0, max_new_tokens=4),
        SamplingParams(n=1, top_k=5, max_new_tokens=70, seed=4),
        SamplingParams(n=3, repetition_penalty=1.5, max_new_tokens=9),
        BeamParams(2, max_new_tokens=5),
    ]
    prompts = [np.arange(9), np.arange(9), np.arange(12), np.arange(3)]
    made, _ = decoding()
    samples = made.run(Request(i, p, own) for i, (p, own) in enumerate(zip(prompts, params, strict=True)))
    for sample in samples:
        own = params[sample.prompt_index]
        if isinstance(own, SamplingParams):
            assert sample.tokens == alone(prompts[sample.prompt_index], own, sample.index)
    assert_all_given_back(made)


@pytest.mark.parametrize("fails_at", [1, 3, 6])
def test_a_model_that_fails_loses_no_page(decoding, fails_at):
    made, model = decoding()
    steps = iter(range(1000))

    def fail(step):
        if next(steps) == fails_at:
            raise RuntimeError("no")
        return model(step)

    made.runner.model = fail
    with pytest.raises(RuntimeError, match="no"):
        run(made, random_prompts(3), SamplingParams(n=3, max_new_tokens=9))
    assert_all_given_back(made)


def broken_from(model, count, row=-1):
    """The model, but that from its ``count``-th step on the logits of one row are NaN."""
    steps = iter(range(1000))

    def broken(step):
        logits = model(step)
        if next(steps) >= count:
            logits[row] = torch.nan
        return logits

    return broken


def test_logits_that_are_broken_name_the_sample(decoding):
    made, model = decoding()
    made.runner.model = broken_from(model, 2, row=1)
    with pytest.raises(ValueError, match="sample 1 of prompt 0"):
        run(made, [np.arange(5)], SamplingParams(n=3, max_new_tokens=9))
    assert_all_given_back(made)


@pytest.mark.parametrize("step", [0, 2], ids=["first tokens", "later tokens"])
def test_logits_that_are_broken_name_the_prompt_of_a_beam_search(step, decoding):
    made, model = decoding()
    made.runner.model = broken_from(model, step, row=1)
    requests = [Request(i, np.arange(5) + 9 * i, BeamParams(num_beams=1, max_new_tokens=9)) for i in range(2)]
    with pytest.raises(ValueError, match="a beam of prompt 1 hold NaN"):
        made.run(requests)
    assert_all_given_back(made)


def test_samples_that_come_in_later_need_no_step_of_their_own(decoding):
    made, model = decoding(most_running=4)
    params = SamplingParams(n=14, max_new_tokens=9, seed=8, stop_token_ids=(1, 2, 3, 4, 5, 6))
    samples = run(made, [np.arange(20)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(20), params, index) for index in range(14)]
    assert made.report.steps - made.report.decode_steps == 1, "the prompt's"
    assert max(model.rows_per_step[1:]) <= 4
    assert_all_given_back(made)


def test_steps_tell_how_many_tokens_they_sampled(decoding):
    sampled = []
    made, _ = decoding(on_step=sampled.append)
    params = SamplingParams(n=7, max_new_tokens=11, seed=8, stop_token_ids=(1, 2, 3, 4, 5, 6))
    samples = run(made, [np.arange(20), np.arange(5)], params)
    assert sum(sampled) == sum(len(sample.tokens) for sample in samples)
    lengths = [len(sample.tokens) for sample in samples]
    assert sampled == [sum(n > step for n in lengths) for step in range(max(lengths))]


def test_first_tokens_that_cannot_be_sampled_lose_no_page(decoding):
    made, model = decoding(most_running=2)
    made.runner.model = broken_from(model, 0)
    with pytest.raises(ValueError, match="of prompt 0 hold NaN"):
        run(made, [np.arange(20)], SamplingParams(n=9, max_new_tokens=6, stop_token_ids=tuple(range(10))))
    assert_all_given_back(made)
