"""Graphs read weights where they lay when they were captured: which moves make them be captured again."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from prefixkit.engine.call import Call
from prefixkit.engine.engine import Engine
from prefixkit.engine.request import Request
from prefixkit.runners.graph_arrays import CannotCapture
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, assert_all_given_back, run
from tests.runners.stand_ins import Capturing


def test_graphs_are_captured_again_once_the_weights_have_moved(decoding, caplog):
    where, params = [1, 2], SamplingParams(n=2, max_new_tokens=6)
    made, _ = decoding(weights=lambda: tuple(where))
    with caplog.at_level(logging.INFO, "prefixkit"):
        for captures in (1, 1):
            run(made, [np.arange(9)], params)
            assert made.runner.graphs.captures == captures
        where[1] = 3
        for captures in (2, 2):
            samples = run(made, [np.arange(9)], params)
            assert made.runner.graphs.captures == captures
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert caplog.text.count("weights have moved") == 1


@pytest.mark.parametrize("moved", [True, False])
def test_weights_that_a_callback_moves_take_the_running_graph_with_them(moved, decoding):
    """Another model's are counted too, and change nothing."""
    where, moves, params = [0], [0], SamplingParams(n=3, max_new_tokens=30)

    def move(tokens, seen=[]):  # noqa: B006
        seen.append(tokens)
        if len(seen) in (5, 6, 19):
            where[0] += moved
            moves[0] += 1

    capturing = Capturing(where=lambda: where[0])
    made, _ = decoding(capturing, weights=lambda: where[0], moves=lambda: moves[0], on_step=move)
    samples = run(made, [np.arange(9)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert made.runner.graphs.captures == (4 if moved else 1)


def test_weights_that_a_first_step_moves_take_older_graphs_with_them(decoding):
    """As those of compiled layers may be."""
    moves, few, many = [], SamplingParams(n=2, max_new_tokens=6), SamplingParams(n=5, max_new_tokens=6)

    def moving(model, step):
        if step.num_rows not in moves:
            moves.append(step.num_rows)
        return model(step)

    made, _ = decoding(steps=moving, weights=lambda: len(moves))
    for params, captures in ((many, 1), (few, 2), (many, 3), (few, 3)):
        samples = run(made, [np.arange(9)], params)
        assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
        assert made.runner.graphs.captures == captures


def test_no_run_goes_on_with_a_graph_whose_weights_a_failed_capture_has_moved(decoding):
    """A graph for fewer rows may move weights in its first step, and fail then: the running one is captured again."""
    where, sizes = [0], []

    def moving(model, step):
        sizes.append(step.num_rows)
        if step.num_rows < 8:
            where[0] = 1
        return model(step)

    class OfEightOnly(Capturing):
        def __call__(self, work):
            if sizes[-1] < 8:
                raise CannotCapture("no memory")
            return super().__call__(work)

    made, _ = decoding(OfEightOnly(where=lambda: where[0]), steps=moving, weights=lambda: where[0])
    params = SamplingParams(n=8, max_new_tokens=14, seed=2, stop_token_ids=tuple(range(6)))
    samples = run(made, [np.arange(9)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert sizes[0] == 8 and min(sizes) < 8 and made.runner.graphs.captures == 2
    assert_all_given_back(made)


def test_graphs_are_captured_again_once_weights_are_said_to_have_changed(decoding):
    made, _ = decoding()
    params, expected = SamplingParams(n=2, max_new_tokens=6), None
    for captures in (1, 1, 2, 2):
        if captures == 2 and made.runner.graphs.captures == 1:
            made.runner.drop_graphs()
        samples = run(made, [np.arange(9)], params)
        assert made.runner.graphs.captures == captures
        assert expected is None or samples == expected
        expected = samples


def test_a_state_that_was_just_read_is_not_read_again(decoding):
    seen = []

    def weights(state=None):
        seen.append(state)
        return "the same"

    made, _ = decoding(weights=weights)
    made = Engine(made.runner, made.store, state="just read")
    for _ in range(2):
        made.run([Request(0, np.arange(9), SamplingParams(n=2, max_new_tokens=6))], Call())
    looks = [state for state in seen if state is not None]
    assert looks == ["just read"] and len(seen) >= 3, "by the first call; the second one reads it"
