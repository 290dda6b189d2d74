"""How steps are kept as graphs, with stand-ins for what needs a GPU: each replay of a graph does its work again."""

from __future__ import annotations

import logging
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from prefixkit.attention.capacity import PlanCapacity
from prefixkit.attention.planner import StepPlan
from prefixkit.engine.decode_run import DecodeSettings
from prefixkit.engine.request import Request
from prefixkit.ops.backend import NotCapturable
from prefixkit.runners import graph as graphs
from prefixkit.runners import graph_arrays
from prefixkit.runners.decoder import CannotDecode
from prefixkit.sampling.params import SamplingParams
from tests.engine.fake_model import make_engine
from tests.engine.runs import alone, assert_all_given_back, random_prompts, run


class Planner:
    """Plans as plain torch runs them, into tensors that stay."""

    def __init__(self, planner, nodes, capacity):
        self.nodes, self.capacity, self._planner = nodes, capacity, planner
        self.length = torch.zeros(nodes, dtype=torch.int32)
        self.work = [torch.zeros(shape, dtype=torch.int32) for shape in capacity.shapes()]
        self.plans = 0

    def load(self, tree):
        planned, _ = self._planner.plan(tree, torch.device("cpu"))
        self._next = planned.plan

    def plan(self):
        self.plans += 1
        for there, array in zip(self.work, self._next.arrays(), strict=True):
            there.fill_(-12345)
            there[: len(array)] = torch.from_numpy(array)
        return self.work


class Planning:
    """How steps in such graphs are planned; every row is one item."""

    def __init__(self, planner):
        self._planner = planner

    def capacity_for(self, tree):
        return PlanCapacity(99, 9, 999, tree.queries.num_rows, 999)

    def planner(self, nodes, capacity, device):
        return Planner(self._planner, nodes, capacity)

    def step_plan(self, work, nodes, tree):
        return StepPlan([*work, *nodes], tree, lambda: self._planner.specify(tree))


class Ring(graph_arrays.Ring):
    @staticmethod
    def of(rows):
        class Ready:
            def record(self):
                pass

            def synchronize(self):
                pass

        tokens, logprobs = torch.zeros((16, rows), dtype=torch.int64), torch.zeros((16, rows))
        return Ring(tokens, logprobs, [Ready() for _ in range(16)])


class Graph:
    def __init__(self, arrays, step, model):
        self.arrays, self.step, self.model = arrays, step, model

    def replay(self):
        self.arrays.tree.advance(self.step.num_rows)
        self.arrays.sampler.sample(self.model(self.step))


class Reading(Graph):
    """Reads weights from where they lay when it was captured."""

    def __init__(self, where, *given):
        super().__init__(*given)
        self.where, self.reads = where, where[0]

    def replay(self):
        assert self.reads == self.where[0], "these weights are gone, that memory may be another's"
        super().replay()


class Decoder(graphs.GraphDecoder):
    graph_bytes = 0

    def _capture(self, arrays, step):
        return Graph(arrays, step, self.model)


@pytest.fixture
def decoding(monkeypatch):
    """A function that makes an engine which decodes by such graphs, and its fake model."""
    monkeypatch.setattr(graph_arrays, "BUCKETS", (1, 2, 3, 5, 8, 13, 21, 34))
    monkeypatch.setattr(graph_arrays, "Ring", Ring)
    monkeypatch.setattr(graphs, "_no_waiting", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))

    def make(**options):
        made, model = make_engine(settings=DecodeSettings(fewest_steps=1, slack=2), **options)
        made.decoder = Decoder(model, Planning(made.planner), made.tree.page_size, "cpu")
        return made, model

    return make


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page_size", [1, 4])
def test_each_sample_is_what_it_would_be_alone(seed, page_size, decoding):
    params = SamplingParams(n=3, temperature=0.9, max_new_tokens=14, seed=seed, stop_token_ids=(3, 4, 5))
    prompts = random_prompts(seed)
    made, model = decoding(page_size=page_size)
    samples = run(made, prompts, params)
    assert [s.tokens for s in samples] == [alone(prompts[s.prompt_index], params, s.index) for s in samples]
    assert made.report.decode_steps >= 13 - 1
    assert set(model.rows_per_step[1:]) <= {1, 2, 3, 5, 8, 13, 21, 34}, "steps of whole buckets"
    assert_all_given_back(made)


def test_a_bucket_is_captured_once_and_a_larger_batch_makes_all_anew(decoding):
    made, _ = decoding()
    few, many = SamplingParams(n=2, max_new_tokens=6), SamplingParams(n=9, max_new_tokens=6)
    run(made, [np.arange(9)], few)
    assert made.decoder.captures == 1
    run(made, [np.arange(9)], few)
    assert made.decoder.captures == 1
    run(made, [np.arange(9)], many)
    run(made, [np.arange(9)], few)
    assert made.decoder.captures == 3, "nine rows, and two again in the new arrays"


def test_graphs_are_captured_again_once_the_weights_have_moved(decoding, caplog):
    made, _ = decoding()
    made.decoder.weights = lambda: tuple(where)
    where, params = [1, 2], SamplingParams(n=2, max_new_tokens=6)
    with caplog.at_level(logging.INFO, "prefixkit"):
        for captures in (1, 1):
            run(made, [np.arange(9)], params)
            assert made.decoder.captures == captures
        where[1] = 3
        for captures in (2, 2):
            samples = run(made, [np.arange(9)], params)
            assert made.decoder.captures == captures
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert caplog.text.count("weights have moved") == 1


@pytest.mark.parametrize("moved", [True, False])
def test_weights_that_a_callback_moves_take_the_running_graph_with_them(moved, decoding):
    """Another model's are counted too, and change nothing."""
    made, model = decoding()
    where, moves, params = [0], [0], SamplingParams(n=3, max_new_tokens=30)

    def move(tokens, seen=[]):  # noqa: B006
        seen.append(tokens)
        if len(seen) in (5, 6, 19):
            where[0] += moved
            moves[0] += 1

    made.decoder._capture = lambda arrays, step: Reading(where, arrays, step, model)
    made.decoder.weights, made.decoder.moves, made.on_step = lambda: where[0], lambda: moves[0], move
    samples = run(made, [np.arange(9)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert made.decoder.captures == (4 if moved else 1)


def test_weights_that_a_first_step_moves_take_older_graphs_with_them(decoding):
    """As those of compiled layers may be."""
    made, model = decoding()
    moves, few, many = [], SamplingParams(n=2, max_new_tokens=6), SamplingParams(n=5, max_new_tokens=6)

    def moving(step):
        if step.num_rows not in moves:
            moves.append(step.num_rows)
        return model(step)

    made.decoder.model, made.decoder.weights = moving, lambda: len(moves)
    for params, there in ((many, {5}), (few, {2}), (many, {2, 5}), (few, {2, 5})):
        samples = run(made, [np.arange(9)], params)
        assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
        assert set(made.decoder._graphs) == there
    assert made.decoder.captures == 3


@pytest.mark.parametrize(("shrink", "buckets"), [(1.0, {8, 5, 2, 1}), (0.5, {8, 2, 1}), (0.2, {8, 1})])
def test_graphs_for_fewer_rows_are_captured_where_they_are_few_enough(shrink, buckets, decoding):
    """Eight samples that end one after the other; rows are compacted late, so 3 of them are never alone."""
    made, model = decoding()
    made.decoder.shrink = shrink
    params = [SamplingParams(max_new_tokens=20 - 2 * index, seed=1) for index in range(8)]
    samples = made.run(Request(index, np.arange(9), own) for index, own in enumerate(params))
    for sample, own in zip(samples, params, strict=True):
        assert sample.tokens == alone(np.arange(9), own, 0)
    assert set(made.decoder._graphs) == buckets
    assert made.decoder.captures == len(buckets)


def test_plans_are_made_anew_now_and_then(decoding, monkeypatch):
    monkeypatch.setattr(graphs, "REPLAN_EVERY", 4)
    made, _ = decoding()
    params = SamplingParams(n=2, max_new_tokens=14, seed=1)
    samples = run(made, [np.arange(9)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert made.decoder._arrays.planner.plans == 1 + 12 // 4


def test_rows_that_cannot_have_a_graph_of_their_own_stay_in_the_one_they_have(decoding, caplog):
    made, model = decoding()
    real = Decoder._capture

    def only_once(self, arrays, step):
        if self.captures:
            raise CannotDecode("no memory")
        return real(self, arrays, step)

    made.decoder._capture = only_once.__get__(made.decoder)
    params = SamplingParams(n=8, max_new_tokens=14, seed=2, stop_token_ids=tuple(range(6)))
    samples = run(made, [np.arange(9)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert "going on with a graph for more rows: no memory" in caplog.text
    assert_all_given_back(made)


def test_no_run_goes_on_with_a_graph_whose_weights_a_failed_capture_has_moved(decoding):
    """A graph for fewer rows may move weights in its first step, and fail then: the running one is captured again."""
    made, model = decoding()
    where, sizes = [0], []

    def moving(step):
        if step.num_rows < 8:
            where[0] = 1
        return model(step)

    def of_eight_only(self, arrays, step):
        sizes.append(step.num_rows)
        if step.num_rows < 8:
            raise CannotDecode("no memory")
        return Reading(where, arrays, step, self.model)

    made.decoder.model, made.decoder.weights = moving, lambda: where[0]
    made.decoder._capture = of_eight_only.__get__(made.decoder)
    params = SamplingParams(n=8, max_new_tokens=14, seed=2, stop_token_ids=tuple(range(6)))
    samples = run(made, [np.arange(9)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert sizes[0] == 8 and sizes.count(8) == 2 and len(sizes) > 2
    assert_all_given_back(made)


def test_a_model_that_waits_decodes_without(decoding, monkeypatch, caplog):
    made, _ = decoding()

    def waits():
        raise CannotDecode("the model waits")

    monkeypatch.setattr(graphs, "_no_waiting", waits)
    params = SamplingParams(n=2, max_new_tokens=7, seed=1)
    samples = run(made, [np.arange(9)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert "decoding step by step: the model waits" in caplog.text
    assert_all_given_back(made)


def test_attention_that_no_graph_can_hold_decodes_without_and_says_so_once(decoding, caplog):
    made, model = decoding()

    def by_torch(step):
        raise NotCapturable("a plan in a CUDA graph's tensors is for the kernels only; run eagerly")

    made.decoder.model = by_torch
    params = SamplingParams(n=2, max_new_tokens=7, seed=1)
    for _ in range(2):
        samples = run(made, [np.arange(9)], params)
        assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert caplog.messages == [
        "decoding step by step: a plan in a CUDA graph's tensors is for the kernels only; run eagerly"
    ]
    assert_all_given_back(made)


class Capturing:
    """What captures: graphs that do their work again, or an error when it comes to the n-th."""

    def __init__(self, error=None, fails=1):
        self.error, self.fails, self.count = error, fails, 0

    def __call__(self, work, pool):
        self.count += 1
        if self.error is not None and self.count == self.fails:
            raise self.error

        class Again:
            def replay(self):
                work()

        return Again()


def with_capture(made, capture):
    """An engine whose decoder captures by that."""
    old = made.decoder

    class Decoder(graphs.GraphDecoder):
        graph_bytes = 0

    made.decoder = Decoder(old.model, old.planning, old.page_size, "cpu", capture=capture)
    return made.decoder


PARAMS = SamplingParams(n=2, max_new_tokens=7, seed=1)


class TestWhatACaptureRaises:
    @pytest.mark.parametrize(
        "error",
        [
            torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
            RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture"),
        ],
    )
    def test_what_cannot_be_captured_decodes_step_by_step(self, decoding, caplog, error):
        made, _ = decoding()
        with_capture(made, Capturing(error))
        samples = run(made, [np.arange(9)], PARAMS)
        assert [s.tokens for s in samples] == [alone(np.arange(9), PARAMS, s.index) for s in samples]
        assert f"decoding step by step: a step cannot be captured in a CUDA graph: {error}" in caplog.text
        assert_all_given_back(made)

    @pytest.mark.parametrize("type_", [torch.AcceleratorError, RuntimeError])
    @pytest.mark.parametrize("fails", [1, 2])
    def test_a_fault_is_raised_with_its_own_message(self, decoding, caplog, type_, fails):
        made, _ = decoding()
        with_capture(made, Capturing(type_("CUDA error: an illegal memory access was encountered"), fails))
        params = SamplingParams(n=8, max_new_tokens=14, seed=2, stop_token_ids=tuple(range(6)))
        with pytest.raises(type_, match=r"^CUDA error: an illegal memory access"):
            run(made, [np.arange(9)], params)
        assert "step by step" not in caplog.text and "going on" not in caplog.text
        assert_all_given_back(made)

    def test_without_memory_for_a_graph_it_decodes_step_by_step(self, decoding, caplog):
        made, _ = decoding()
        decoder = with_capture(made, Capturing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")))
        samples = run(made, [np.arange(9)], PARAMS)
        assert [s.tokens for s in samples] == [alone(np.arange(9), PARAMS, s.index) for s in samples]
        assert caplog.messages == [
            "decoding step by step: no memory for CUDA graphs of 2 rows: CUDA out of memory. Tried to allocate 2 GiB."
        ]
        assert made.decoder is None and decoder.captures == 0
        assert_all_given_back(made)

    def test_without_memory_for_the_steps_before_a_capture_nothing_of_it_stays(self, decoding, caplog):
        made, model = decoding()
        kept = []

        def no_memory(step):
            kept.append(weakref.ref(decoder._arrays))
            raise torch.OutOfMemoryError("CUDA out of memory.")

        decoder = with_capture(made, Capturing())
        decoder.model = no_memory
        samples = run(made, [np.arange(9)], PARAMS)
        assert [s.tokens for s in samples] == [alone(np.arange(9), PARAMS, s.index) for s in samples]
        assert "decoding step by step: no memory for CUDA graphs of 2 rows" in caplog.text
        assert kept and not any(one() for one in kept), "the arrays are gone while the decoder is still there"
        assert_all_given_back(made)


def test_asking_whether_weights_have_moved_changes_nothing(decoding):
    made, _ = decoding()
    where, moves, answers = [0], [0], []
    decoder = with_capture(made, Capturing())
    decoder.weights, decoder.moves = lambda: where[0], lambda: moves[0]

    def move(tokens, seen=[]):  # noqa: B006
        seen.append(tokens)
        if len(seen) in (3, 5):
            moves[0] += 1
            where[0] += len(seen) == 5  # the first are another model's
        answers.append([decoder.stale for _ in range(3)])

    made.on_step = move
    run(made, [np.arange(9)], SamplingParams(n=2, max_new_tokens=9))
    assert answers == [[index == 4] * 3 for index in range(9)]


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 1000, 4096])
def test_buckets_hold_their_rows_and_waste_little(rows):
    bucket = graph_arrays.bucket_of(rows)
    assert rows <= bucket < max(rows * 2, 3)
    assert graph_arrays.bucket_of(bucket) == bucket
