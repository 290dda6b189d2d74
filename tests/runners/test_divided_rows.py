"""Graphs in which each of two processes samples its half of the rows: samples are what they would be in one process.

Each process is a thread with an engine of its own, over a model that returns half of the logits where it may.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from prefixkit.agreement import Alone
from prefixkit.engine.request import BeamParams, Request
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, assert_all_given_back, beams_alone

VARIED = [
    SamplingParams(n=5, max_new_tokens=3, seed=1, temperature=1.2),
    SamplingParams(n=4, max_new_tokens=19, seed=2, repetition_penalty=1.5, top_p=0.9),
    SamplingParams(n=6, max_new_tokens=11, seed=3, repetition_penalty=0.7, stop_token_ids=(7, 9)),
    SamplingParams(n=3, max_new_tokens=26, seed=4),
]


class OneOfTwo(Alone):
    """Agrees with another thread; ``halves`` counts exchanges by the shapes of their tensors."""

    processes = 2

    def __init__(self, rank, given, barrier):
        self.rank, self.given, self.barrier, self.halves = rank, given, barrier, []

    def broadcast(self, *tensors):
        for one, theirs in zip(tensors, self.all_of(tensors)[0], strict=True):
            one.copy_(theirs)

    def exchange(self, *tensors):
        self.halves.append([tuple(one.shape) for one in tensors])
        parts = zip(*self.all_of(tensors), strict=True)
        for one, both in zip(tensors, parts, strict=True):
            for half, theirs in zip(one.chunk(2), [part.chunk(2)[rank] for rank, part in enumerate(both)], strict=True):
                half.copy_(theirs)

    def all_of(self, tensors):
        self.barrier.wait(60)  # until the other has read what came before
        self.given[self.rank] = [one.clone() for one in tensors]
        self.barrier.wait(60)
        return [*self.given]


@pytest.fixture
def both(decoding):
    """A function that runs requests in both engines: the results of each, and the engines."""

    def run(requests):
        given, barrier = [None, None], threading.Barrier(2)

        def steps(rank):
            def halved(model, step):
                logits = model(step)
                return logits.chunk(2)[rank] if step.own_logits and len(logits) % 2 == 0 else logits

            return halved

        engines = [decoding(steps=steps(rank))[0] for rank in range(2)]
        for rank, engine in enumerate(engines):
            engine.runner.eager.agreement = OneOfTwo(rank, given, barrier)
        with ThreadPoolExecutor(2) as threads:
            results = list(threads.map(lambda engine: engine.run(requests), engines))
        for engine in engines:
            assert_all_given_back(engine)
        return results, engines

    return run


def test_samples_are_those_of_one_process_as_rows_end_and_move_between_halves(both):
    prompts = [np.arange(3), np.arange(9), np.arange(3), np.arange(1, 5)]
    results, engines = both([Request(i, *pair) for i, pair in enumerate(zip(prompts, VARIED, strict=True))])
    for samples in results:
        assert len(samples) == sum(params.n for params in VARIED)
        for one in samples:
            assert one.tokens == alone(prompts[one.prompt_index], VARIED[one.prompt_index], one.index)
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)
    for engine in engines:
        halves = engine.runner.eager.agreement.halves
        rows = {shapes[0][0] for shapes in halves}
        assert {34, 8, 2} & rows and not any(count % 2 for count in rows)
        assert any(len(shapes[0]) == 2 for shapes in halves), "states of rows that move"
        assert engine.report.graph_steps > len(halves) // 2, "graphs of odd numbers of rows are whole"


def test_beams_and_drawn_probabilities_stay_right(both):
    params = BeamParams(num_beams=2, max_new_tokens=4, stop_token_ids=())
    results, engines = both([Request(0, np.arange(9), params)])
    expected = [list(beam.tokens) for beam in beams_alone(np.arange(9), params)]
    for beams in results:
        assert [beam.tokens for beam in beams] == expected[: len(beams)]
    assert not any(engine.runner.eager.agreement.halves for engine in engines)
    drawn = SamplingParams(n=8, max_new_tokens=6, seed=5, top_p=0.8, logprobs="sampled")
    results, engines = both([Request(0, np.arange(4), drawn)])
    for one, other in zip(*results, strict=True):
        assert one.tokens == other.tokens == alone(np.arange(4), drawn, one.index)
        assert np.array_equal(one.logprobs, other.logprobs) and np.array_equal(one.masses, other.masses)
    assert all((8, 2) in shapes for engine in engines for shapes in engine.runner.eager.agreement.halves)
