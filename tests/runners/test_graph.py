"""How steps are kept as graphs, with stand-ins for what needs a GPU."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from prefixkit.engine.request import BeamParams, Request
from prefixkit.runners import graph_arrays
from prefixkit.runners.graph_arrays import CannotCapture
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, assert_all_given_back, random_prompts, run
from prefixkit.testing.fake_model import VOCAB, make_engine
from tests.runners.stand_ins import Capturing


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page_size", [1, 4])
def test_each_sample_is_what_it_would_be_alone(seed, page_size, decoding):
    params = SamplingParams(n=3, temperature=0.9, max_new_tokens=14, seed=seed, stop_token_ids=(3, 4, 5))
    prompts = random_prompts(seed)
    made, model = decoding(page_size=page_size)
    samples = run(made, prompts, params)
    assert [s.tokens for s in samples] == [alone(prompts[s.prompt_index], params, s.index) for s in samples]
    assert made.report.graph_steps >= 13 - 1
    assert set(model.rows_per_step[1:]) <= {1, 2, 3, 5, 8, 13, 21, 34}, "steps of whole buckets"
    assert_all_given_back(made)


def test_a_bucket_is_captured_once_and_a_larger_batch_makes_all_anew(decoding):
    made, _ = decoding()
    few, many = SamplingParams(n=2, max_new_tokens=6), SamplingParams(n=9, max_new_tokens=6)
    run(made, [np.arange(9)], few)
    assert made.runner.graphs.captures == 1
    run(made, [np.arange(9)], few)
    assert made.runner.graphs.captures == 1
    run(made, [np.arange(9)], many)
    run(made, [np.arange(9)], few)
    assert made.runner.graphs.captures == 3, "nine rows, and two again in the new arrays"


@pytest.mark.parametrize(("least", "buckets"), [(1, {8, 5, 2, 1}), (2, {8, 5, 2})])
def test_fewer_rows_have_graphs_of_their_own_down_to_the_least(least, buckets, decoding):
    """Eight samples that end one after the other; rows are compacted late, so 3 of them are never alone."""
    made, model = decoding(least_rows=least)
    params = [SamplingParams(max_new_tokens=20 - 2 * index, seed=1) for index in range(8)]
    samples = made.run(Request(index, np.arange(9), own) for index, own in enumerate(params))
    for sample, own in zip(samples, params, strict=True):
        assert sample.tokens == alone(np.arange(9), own, 0)
    assert set(model.rows_per_step[1:]) == buckets
    assert made.runner.graphs.captures == len(buckets)


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_row_that_has_filled_its_last_page_leaves_the_kv_of_its_last_token_as_it_is(page_size, decoding):
    """Two rows end, and the host compacts the batch once the third has run its last step too, and before it knows."""
    for most in range(4, 8):
        made, _ = decoding(page_size=page_size, retain_samples=True)
        params = [SamplingParams(max_new_tokens=one, seed=i) for i, one in enumerate((most, most, most + 1, 30))]
        samples = made.run(Request(index, np.arange(9), own) for index, own in enumerate(params))
        then = SamplingParams(max_new_tokens=3, temperature=0)
        for sample in samples:
            text = np.concatenate((np.arange(9), sample.tokens))
            assert run(made, [text], then)[0].tokens == alone(text, then, 0), (most, sample.index)
        assert_all_given_back(made)


def test_a_lone_row_runs_in_the_least_bucket(decoding):
    made, model = decoding(least_rows=2)
    (sample,) = run(made, [np.arange(9)], SamplingParams(max_new_tokens=9, seed=4))
    assert sample.tokens == alone(np.arange(9), SamplingParams(max_new_tokens=9, seed=4), 0)
    assert set(model.rows_per_step[1:]) == {2}


def test_plans_are_made_anew_now_and_then(decoding):
    made, _ = decoding()
    made.runner.replan_every = 4
    params = SamplingParams(n=2, max_new_tokens=14, seed=1)
    samples = run(made, [np.arange(9)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    (planner,) = made.runner.plannings[0].planners
    assert planner.plans == 1 + 12 // 4


def test_rows_that_cannot_have_a_graph_of_their_own_stay_in_the_one_they_have(decoding, caplog):
    made, _ = decoding(Capturing(CannotCapture("no memory"), fails=2, always=True))
    params = SamplingParams(n=8, max_new_tokens=14, seed=2, stop_token_ids=tuple(range(6)))
    samples = run(made, [np.arange(9)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert "going on with a graph for more rows: no memory" in caplog.text
    assert made.runner.graphs.captures == 1
    assert_all_given_back(made)


def test_the_probabilities_of_samples_come_from_graphs_as_they_come_step_by_step(decoding):
    drawn = SamplingParams(
        n=5, temperature=0.8, top_p=0.9, max_new_tokens=14, logprobs="sampled", stop_token_ids=(3, 4)
    )
    beams = BeamParams(3, max_new_tokens=6, stop_token_ids=(3,))
    requests = [Request(0, np.arange(9), drawn), Request(1, np.arange(4), SamplingParams(n=2, max_new_tokens=14))]
    for asked in (requests, [*requests, Request(2, np.arange(3), beams)]):
        made, _ = decoding()
        plain, _ = make_engine()
        found = made.run(asked)
        assert found == plain.run(asked)
        assert all(len(sample.masses) == len(sample.tokens) and min(sample.masses) >= 0.9 for sample in found[:5])
        assert all(sample.masses is None for sample in found[5:])
        assert made.report.graph_steps == made.report.decode_steps > 12


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_beams_run_in_graphs_beside_samples_and_are_what_they_would_be_step_by_step(decoding, page_size):
    params = [
        BeamParams(4, num_return_sequences=4, max_new_tokens=12, stop_token_ids=(3,)),
        SamplingParams(n=3, max_new_tokens=14, seed=7),
        BeamParams(2, max_new_tokens=15, stop_token_ids=(5, 6)),
        BeamParams(30, 2, max_new_tokens=5, stop_token_ids=(1, 2)),  # candidates: more than the vocabulary has
    ]
    prompts = [np.arange(9), np.arange(9), np.arange(4), np.arange(3)]
    requests = [Request(i, prompt, own) for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))]
    made, model = decoding(page_size=page_size)
    plain, _ = make_engine(page_size=page_size)
    assert made.run(requests) == plain.run(requests)
    assert made.report.graph_steps == made.report.decode_steps > 12
    assert made.report.unpipelined["beam search"] >= 8
    assert_all_given_back(made)


def test_graphs_give_all_tokens_to_searches_that_look_at_more_than_there_are(decoding):
    params = BeamParams(20, num_return_sequences=20, max_new_tokens=6)
    made, _ = decoding()
    plain, _ = make_engine()
    assert 2 * params.num_beams < VOCAB < 64, "the likeliest that a graph gives are a power of 2"
    assert run(made, [np.arange(9)], params) == run(plain, [np.arange(9)], params)
    assert made.report.graph_steps == 5


def test_the_tensors_of_a_captured_plan_live_as_long_as_its_graph(decoding):
    """A graph holds addresses: no other tensor may get the memory of one that a planner makes for each plan."""
    seen = []

    def steps(model, step):
        seen[:] = map(weakref.ref, step.plans[0].tensors)
        return model(step)

    class Replayed(Exception):
        pass

    class Graph:
        def replay(self):
            raise Replayed([at for at, tensor in enumerate(seen) if tensor() is None])

    class Addresses(Capturing):
        """Holds nothing of what it has captured, as a CUDA graph."""

        def __call__(self, work):
            work()
            return Graph()

    made, _ = decoding(Addresses(), steps=steps)
    with pytest.raises(Replayed) as replayed:
        run(made, [np.arange(9)], SamplingParams(n=2, max_new_tokens=6))
    assert len(seen) > 1 and replayed.value.args == ([],), "these are gone"


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 1000, 4096])
def test_buckets_hold_their_rows_and_waste_little(rows):
    bucket = graph_arrays.bucket_of(rows)
    assert rows <= bucket < max(rows * 2, 3)
    assert graph_arrays.bucket_of(bucket) == bucket
