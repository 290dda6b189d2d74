"""Graphs read weights where they lay when they were captured: which moves make them be captured again."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from prefixkit.runners.decoder import CannotDecode
from prefixkit.sampling.params import SamplingParams
from tests.engine.runs import alone, assert_all_given_back, run
from tests.runners.stand_ins import Capturing, Graph, with_capture


class Reading(Graph):
    """Reads weights from where they lay when it was captured."""

    def __init__(self, where, *given):
        super().__init__(*given)
        self.where, self.reads = where, where[0]

    def replay(self):
        assert self.reads == self.where[0], "these weights are gone, that memory may be another's"
        super().replay()


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
