"""Steps of few rows by graphs: what they compute is what single steps do, and only repeated sizes are captured."""

from __future__ import annotations

import gc
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch

from prefixkit.engine.request import BeamParams, Request
from prefixkit.ops.backend import NotCapturable
from prefixkit.runners import short_steps
from prefixkit.runners.eager import EagerRunner
from prefixkit.runners.graph import GraphRunner
from prefixkit.runners.graph_arrays import CannotCapture
from prefixkit.runners.short_steps import REPLAYS, ROWS, USES, Bucket, ShortGraph, most_short_rows
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, assert_all_given_back, run
from prefixkit.testing.fake_model import VOCAB, make_engine
from tests.runners.stand_ins import Capturing

HEAD = np.random.default_rng(0).integers(0, 50, 40)
FIRST = SamplingParams(max_new_tokens=1)


def fresh(rng, tokens):
    """A prompt of the known head and ``tokens`` new ones."""
    return np.concatenate((HEAD, rng.integers(0, 50, tokens)))


def assert_first_tokens(made, prompts, params=FIRST):
    for sample in run(made, prompts, params):
        assert sample.tokens == alone(prompts[sample.prompt_index], params, sample.index)


def living(kind):
    """The objects of a class that something holds."""
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, kind)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("chunk", [9, 64])
def test_prompts_of_any_tree_give_what_each_would_give_alone(seed, page_size, chunk, decoding):
    """Prompts go on from anywhere in earlier ones, and are computed in chunks, beside samples that run."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    made, model = decoding(short=4096, page_size=page_size, prefill_chunk=chunk)
    known = [HEAD]
    for call in range(14):
        before = [known[rng.integers(len(known))] for _ in range(rng.integers(1, 5))]
        prompts = [np.concatenate((one[: rng.integers(1, len(one) + 1)], rng.integers(0, 50, 9))) for one in before]
        known += prompts
        params = SamplingParams(n=int(rng.integers(1, 4)), max_new_tokens=int(rng.integers(1, 7)), seed=call)
        assert_first_tokens(made, prompts, params)
    assert made.runner.graphs.replays > 10 and made.runner.graphs.captures > 1
    assert {16, 32} & set(model.rows_per_step), "steps of whole buckets"
    assert_all_given_back(made)


def test_a_size_is_captured_when_it_has_come_often(decoding):
    made, model = decoding(short=4096)
    rng, graphs = np.random.default_rng(1), made.runner.graphs
    assert_first_tokens(made, [HEAD])
    for use in range(1, USES + 3):
        assert_first_tokens(made, [fresh(rng, int(rng.integers(2, 16)))])
        assert (graphs.captures, graphs.replays) == ((1, use - USES) if use >= USES else (0, 0))
    assert model.rows_per_step[-3:] == [16, 16, 16]
    assert_first_tokens(made, [fresh(rng, 30)])
    assert 20 < model.rows_per_step[-1] <= 30 and graphs.captures == 1, "another bucket, at its first use"


def test_a_tree_that_does_not_fit_has_the_size_captured_anew(decoding):
    made, _ = decoding(short=4096)
    rng, graphs = np.random.default_rng(2), made.runner.graphs
    assert_first_tokens(made, [HEAD])
    for _ in range(USES + 1):
        assert_first_tokens(made, [fresh(rng, 8)])
    assert (graphs.captures, graphs.replays) == (1, 1)
    long = rng.integers(0, 50, 700)
    assert_first_tokens(made, [long])
    assert_first_tokens(made, [np.concatenate((long, [1, 2, 3]))])
    assert (graphs.captures, graphs.replays) == (2, 1), "its pages are more"
    for _ in range(3):
        assert_first_tokens(made, [fresh(rng, 8)])
    assert (graphs.captures, graphs.replays) == (2, 4)


def test_longer_steps_than_pay_are_left_alone(decoding):
    made, _ = decoding(short=63)
    rng = np.random.default_rng(3)
    for _ in range(2 * USES):
        assert_first_tokens(made, [fresh(rng, 40)])
    assert made.runner.graphs.captures == 0
    for _ in range(2 * USES):
        assert_first_tokens(made, [fresh(rng, 30)])
    assert made.runner.graphs.captures == 1, "of 32 rows, not of 64"


def test_beams_begin_with_graphs_as_with_single_steps(decoding):
    made, _ = decoding(short=4096)
    plain, _ = make_engine()
    rng, beams = np.random.default_rng(4), BeamParams(3, 3, max_new_tokens=4, stop_token_ids=(3,))
    for _ in range(2 * USES):
        asked = [Request(0, fresh(rng, 7), beams), Request(1, fresh(rng, 5), SamplingParams(n=2, max_new_tokens=3))]
        assert made.run(asked) == plain.run(asked)
    assert_all_given_back(made)


@pytest.mark.parametrize("error", [CannotCapture("it waits"), NotCapturable("its plan is for the kernels only")])
def test_what_no_graph_can_hold_runs_step_by_step_and_so_do_more_rows(decoding, caplog, error):
    """As experts of many rows, which wait for the GPU."""

    def steps(model, step):
        if step.num_rows > 16 and isinstance(error, NotCapturable):
            raise error
        return model(step)

    captured = Capturing(error) if isinstance(error, CannotCapture) else Capturing()
    made, model = decoding(captured, short=4096, steps=steps)
    rng = np.random.default_rng(5)
    caplog.set_level("INFO", "prefixkit")
    assert_first_tokens(made, [HEAD])
    for tokens in (25, 60, 9):
        for _ in range(2 * USES):
            assert_first_tokens(made, [fresh(rng, tokens)])
    assert caplog.text.count("steps of 32 rows or more run without CUDA graphs") == 1
    assert set(model.rows_per_step) - {16} and made.runner.graphs.captures == 1, "of 16 rows"
    assert_all_given_back(made)


def test_a_size_that_no_graph_could_hold_is_tried_again_once_weights_have_moved(decoding):
    """With another adapter a step may not wait for the GPU."""
    places = [0]
    made, _ = decoding(Capturing(CannotCapture("it waits")), short=4096, weights=lambda: places[0])
    rng, graphs = np.random.default_rng(18), made.runner.graphs
    assert_first_tokens(made, [HEAD])
    for captures in (0, 1):
        for _ in range(2 * USES):
            assert_first_tokens(made, [fresh(rng, 9)])
        assert graphs.captures == captures
        places[0] += 1


def test_without_memory_a_size_is_tried_again_much_later(decoding, caplog):
    made, _ = decoding(Capturing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")), short=4096)
    rng, graphs = np.random.default_rng(6), made.runner.graphs
    caplog.set_level("INFO", "prefixkit")
    for _ in range(4 * USES):
        assert_first_tokens(made, [fresh(rng, 9)])
    assert graphs.captures == 0 and caplog.text.count("no memory for a CUDA graph of a step of 16 rows") == 1
    for _ in range(40):
        assert_first_tokens(made, [fresh(rng, 9)])
    assert graphs.captures == 1 and graphs.replays > 0
    assert_all_given_back(made)


def test_graphs_whose_weights_have_moved_are_dropped_and_captured_once_they_pay_again(decoding):
    """So weights that move at each call, as adapters that alternate, cost no captures."""
    places = [0]
    made, _ = decoding(Capturing(where=lambda: places[0]), short=4096, weights=lambda: places[0])
    rng, graphs = np.random.default_rng(7), made.runner.graphs
    assert_first_tokens(made, [HEAD])
    for _ in range(USES + 2):
        assert_first_tokens(made, [fresh(rng, 9)])
    assert (graphs.captures, graphs.replays) == (1, 2)
    for _ in range(2 * USES):
        places[0] += 1
        assert_first_tokens(made, [fresh(rng, 9)])
    assert (graphs.captures, graphs.replays) == (1, 2)
    for _ in range(USES):
        assert_first_tokens(made, [fresh(rng, 9)])
    assert (graphs.captures, graphs.replays) == (2, 3)


def test_graphs_that_are_dropped_for_other_reasons_are_captured_again_at_once(decoding):
    """As where the pool of states has grown, which other graphs read at its old address."""
    made, _ = decoding(short=4096)
    rng, graphs = np.random.default_rng(17), made.runner.graphs
    assert_first_tokens(made, [HEAD])
    for captures in (1, 2, 3):
        for _ in range(USES if captures == 1 else 1):
            assert_first_tokens(made, [fresh(rng, 9)])
        assert graphs.captures == captures
        assert_first_tokens(made, [fresh(rng, 9)])
        assert (graphs.captures, graphs.replays) == (captures, captures)
        made.runner.drop_graphs()


def test_more_sizes_in_turn_than_may_have_graphs_cost_few_captures(decoding, monkeypatch):
    monkeypatch.setattr(short_steps, "MOST_SIZES", 2)
    made, _ = decoding(short=4096)
    rng, graphs = np.random.default_rng(12), made.runner.graphs
    assert_first_tokens(made, [HEAD])
    for _ in range(6 * USES):
        for tokens in (9, 25, 50):
            assert_first_tokens(made, [fresh(rng, tokens)])
    assert graphs.captures <= 2 + graphs.replays // REPLAYS and graphs.replays > 3 * USES


def test_graphs_write_their_logits_to_one_buffer(decoding):
    """With one for each size, scores in steps of many sizes would take gigabytes."""
    made, _ = decoding(short=4096)
    rng, others = np.random.default_rng(15), living(ShortGraph)
    assert_first_tokens(made, [HEAD])
    for _ in range(USES + 1):
        for tokens in (9, 25, 50):
            assert_first_tokens(made, [fresh(rng, tokens)])
    graphs = [one for one in living(ShortGraph) if one not in others]
    assert len(graphs) == 3 and len({one.captured.logits.untyped_storage().data_ptr() for one in graphs}) == 1


def test_scores_report_the_memory_of_their_graphs(decoding):
    captured = Capturing()
    captured.bytes = 123
    made, _ = decoding(captured, short=4096)
    rng = np.random.default_rng(13)
    for _ in range(1 + USES):
        made.score([HEAD], [[rng.integers(0, 50, 5)]], VOCAB)
    assert made.report.captures == 1 and made.report.graph_bytes == 123


class Layers:
    """Compiled layers that some call of a user has compiled."""

    compiled = False

    def __init__(self, model):
        self.model, self.steps = model, 0

    def __call__(self, step):
        self.steps += 1
        return self.model(step)

    def serves(self, step, compiling):
        return self.compiled


def test_graphs_are_captured_again_once_layers_are_compiled(decoding):
    made, model = decoding()
    layers, planning = Layers(model), made.runner.plannings[0]
    eager = EagerRunner(model, made.runner.eager.planners, compiled=layers)
    made.runner = GraphRunner(eager, layers, [planning], 4, short=4096, capture=Capturing)
    rng, graphs = np.random.default_rng(8), made.runner.graphs
    assert_first_tokens(made, [HEAD])
    for _ in range(USES + 1):
        assert_first_tokens(made, [fresh(rng, 9)])
    assert (graphs.captures, graphs.replays, layers.steps) == (1, 1, 0)
    layers.compiled = True
    for _ in range(3):
        assert_first_tokens(made, [fresh(rng, 9)])
    assert (graphs.captures, graphs.replays) == (2, 3) and layers.steps >= 3


def test_a_dropped_runner_is_freed_at_once_with_its_graphs(decoding):
    """Else its pool would stay until Python looks for cycles."""
    made, _ = decoding(short=4096)
    rng = np.random.default_rng(9)
    for _ in range(2 * USES):
        assert_first_tokens(made, [fresh(rng, 9)])
    dropped = [weakref.ref(one) for one in (made.runner, made.runner.eager, made.runner.eager.graphs)]
    enabled = gc.isenabled()
    gc.disable()
    made.runner = made.last = None
    left = [one() for one in dropped]
    (gc.enable if enabled else gc.disable)()
    assert left == [None] * 3


class Places(NamedTuple):
    """What a runner is told of weights."""

    values: int
    hooked: bool


def test_a_model_with_hooks_runs_without_graphs_until_they_are_removed(decoding):
    """Python code of hooks runs with each prompt, as users expect who read or steer hidden states."""
    places = [Places(1, False)]
    made, _ = decoding(short=4096, weights=lambda: places[0])
    rng, graphs = np.random.default_rng(10), made.runner.graphs
    assert_first_tokens(made, [HEAD])
    for hooked, replays in ((False, 2), (True, 2), (False, 4)):
        places[0] = Places(places[0].values + 1, hooked)
        for _ in range(USES + 2):
            assert_first_tokens(made, [fresh(rng, 9)])
        assert graphs.replays == replays


def test_buckets_hold_their_steps_with_little_to_spare():
    for rows in range(1, ROWS[-1] + 1, 7):
        for outputs in {1, min(rows, 9), (rows + 1) // 2, rows}:
            bucket = Bucket.of(rows, outputs)
            assert outputs <= bucket.outputs <= bucket.rows and rows <= bucket.rows
            assert bucket.rows < 2 * rows or bucket.rows == 16
            assert bucket.outputs <= max(8, 4 * outputs)
    assert Bucket.of(ROWS[-1] + 1, 1) is None and Bucket.of(20, 0) is None


def test_small_models_gain_from_graphs_of_more_rows():
    assert 512 < most_short_rows(32, 7_000_000_000) < 1024 < most_short_rows(16, 1_000_000_000) < ROWS[-1]
    assert most_short_rows(30, 100_000_000) > ROWS[-1]


def test_other_weights_are_checked_before_their_first_capture(decoding):
    """Some wait for the GPU, as adapters may."""
    places = [0]
    made, model = decoding(short=4096, weights=lambda: places[0])
    rng = np.random.default_rng(11)
    assert_first_tokens(made, [HEAD])
    for _ in range(2):
        for _ in range(USES):
            assert_first_tokens(made, [fresh(rng, 9)])
        assert model.rows_per_step[-2:] == [16, 16], "the check, and the step"
        places[0] += 1
