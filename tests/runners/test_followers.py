"""Runners of a process that is not the first of its model: what the first has sampled is what they give and go on with.

A stand-in for the first process writes its tokens where this one has sampled.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkit.agreement import Alone
from prefixkit.engine.request import BeamParams
from prefixkit.runners.capture import done_by_all
from prefixkit.runners.graph_arrays import CannotCapture
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, assert_all_given_back, run
from prefixkit.testing.fake_model import make_engine

PARAMS = SamplingParams(n=3, max_new_tokens=6, seed=1)


class First(Alone):
    """Agrees with a first process that samples token 7 only, and whose captures come to ``least``."""

    processes, rank = 2, 1

    def __init__(self, least=None):
        self.of_first, self.sent = least, 0

    def least(self, number):
        return number if self.of_first is None else min(number, self.of_first)

    def broadcast(self, *tensors):
        self.sent += 1
        for one in tensors:
            if one.dtype == torch.int64:
                one.fill_(7)
            elif one.ndim == 1:
                one.fill_(-0.5)


@pytest.mark.parametrize("graphs", [False, True])
def test_each_token_is_the_first_process_s_in_steps_and_in_graphs(graphs, decoding):
    made, _ = decoding() if graphs else make_engine()
    eager = made.runner.eager if graphs else made.runner
    eager.agreement = First()
    samples = run(made, [np.arange(9), np.arange(4)], PARAMS)
    assert {(*one.tokens,) for one in samples} == {(7,) * 6}
    assert {(*one.logprobs,) for one in samples} == {(-0.5,) * 6}
    assert bool(made.report.graph_steps) == graphs
    assert_all_given_back(made)


@pytest.mark.parametrize("graphs", [False, True])
def test_the_candidates_of_beams_are_the_first_process_s(graphs, decoding):
    made, _ = decoding() if graphs else make_engine()
    (made.runner.eager if graphs else made.runner).agreement = First()
    (best, *_) = run(made, [np.arange(9)], BeamParams(num_beams=2, max_new_tokens=4, stop_token_ids=()))
    assert best.tokens == [7] * 4


def test_a_step_by_a_graph_sends_one_message(decoding):
    made, _ = decoding()
    made.runner.eager.agreement = first = First()
    run(made, [np.arange(9)], PARAMS)
    of_first_tokens = 2  # one of tokens, and one of candidates of beams, of which there are none
    assert first.sent == of_first_tokens + made.report.graph_steps


@pytest.mark.parametrize(("least", "said"), [(0, "another process of the model cannot"), (1, "no memory")])
def test_a_graph_that_another_process_cannot_capture_is_captured_by_none(least, said, decoding, caplog):
    made, _ = decoding()
    made.runner.eager.agreement = First(least)
    made.runner.eager.agreement.broadcast = lambda *tensors: None
    samples = run(made, [np.arange(9)], PARAMS)
    assert [s.tokens for s in samples] == [alone(np.arange(9), PARAMS, s.index) for s in samples]
    assert "decoding step by step" in caplog.text and said in caplog.text
    assert made.report.graph_steps == 0
    assert_all_given_back(made)


def test_a_failure_of_its_own_is_raised_as_it_is():
    def fails():
        raise CannotCapture("it waits")

    with pytest.raises(CannotCapture, match="it waits"):
        done_by_all(First(), fails)
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        done_by_all(First(), lambda: (_ for _ in ()).throw(RuntimeError("the GPU is gone")))
    assert done_by_all(First(), lambda: 5) == 5
