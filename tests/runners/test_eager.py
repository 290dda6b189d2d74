"""Which steps a runner gives to compiled layers, and for which it lets them be compiled."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.engine.request import BeamParams, Request
from prefixkit.runners.graph_arrays import CannotCapture
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, run
from tests.runners.stand_ins import Capturing


class Compiled:
    """Compiled layers of a model: they serve any step of several rows once one may compile them."""

    def __init__(self, model):
        self.model, self.compiled, self.rows, self.refused = model, False, [], []

    def serves(self, step, compiling):
        self.compiled |= compiling
        if not self.compiled:
            self.refused.append(step.num_rows)
        return self.compiled and step.num_rows > 1

    def __call__(self, step):
        self.rows.append(step.num_rows)
        return self.model(step)


@pytest.fixture
def compiling(decoding):
    """A function that makes an engine as ``decoding`` does, whose graphs need so many steps, and its layers."""

    def make(*capturing, fewest_steps=4, **options):
        made, model = decoding(*capturing, **options)
        made.runner.fewest_steps = fewest_steps
        made.runner.eager.compiled = Compiled(model)
        return made, made.runner.eager.compiled

    return make


@pytest.mark.parametrize(("new", "compiles"), [(1, False), (4, False), (5, True), (20, True)])
def test_prompts_compile_layers_where_graphs_of_their_call_would(new, compiles, compiling):
    """Graphs are captured from four decode steps on, and the first token needs none."""
    made, layers = compiling()
    params = SamplingParams(n=2, max_new_tokens=new, seed=3)
    samples = run(made, [np.arange(9)], params)
    assert [s.tokens for s in samples] == [alone(np.arange(9), params, s.index) for s in samples]
    assert layers.compiled == compiles == (made.runner.graphs.captures > 0)
    assert (layers.rows[:1], layers.refused[:1]) == (([9], []) if compiles else ([], [9]))


def test_prompts_of_searches_compile_layers_too(compiling):
    made, layers = compiling()
    made.run([Request(0, np.arange(9), BeamParams(3, max_new_tokens=8, stop_token_ids=()))])
    assert layers.rows[0] == 9
    assert made.runner.graphs.captures > 0


def test_what_was_compiled_serves_calls_that_compile_nothing(compiling):
    made, layers = compiling()
    run(made, [np.arange(9)], SamplingParams(max_new_tokens=1))
    run(made, [np.arange(9)], SamplingParams(max_new_tokens=9))
    run(made, [np.arange(12) + 20], SamplingParams(max_new_tokens=1))
    assert layers.refused[0] == 9
    assert layers.rows[-1] == 12


def test_prompts_beside_samples_go_through_compiled_layers(compiling):
    """More samples than may run at once: the later prompts run beside the tokens of the others."""
    made, layers = compiling(prefill_chunk=8, most_running=4)
    prompts = [np.arange(9) + 9 * i for i in range(4)]
    params = SamplingParams(n=2, max_new_tokens=9, seed=5)
    samples = run(made, prompts, params)
    assert [s.tokens for s in samples] == [alone(prompts[s.prompt_index], params, s.index) for s in samples]
    assert not layers.refused
    assert max(layers.rows) > 8, "prompt tokens and others in one step"


def test_layers_are_not_compiled_for_prompts_once_no_graph_can_be_captured(compiling):
    made, layers = compiling(Capturing(CannotCapture("the model waits")))
    params = SamplingParams(n=2, max_new_tokens=9)
    run(made, [np.arange(9)], params)
    assert layers.compiled, "what the first prompt could not know"
    layers.compiled = False
    run(made, [np.arange(9) + 9], params)
    assert not layers.compiled
