"""What no graph can hold decodes step by step; a fault is raised; neither loses a page."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from prefixkit.ops.backend import NotCapturable
from prefixkit.runners.graph_arrays import CannotCapture, GraphArrays
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, assert_all_given_back, run
from tests.runners.stand_ins import Capturing

PARAMS = SamplingParams(n=2, max_new_tokens=7, seed=1)


def raising(error):
    """Steps in graphs that raise."""

    def steps(model, step):
        raise error

    return steps


@pytest.mark.parametrize("error", [CannotCapture("it waits"), NotCapturable("its plan is for the kernels only")])
def test_a_model_that_no_graph_can_hold_decodes_step_by_step_and_says_so_once(decoding, caplog, error):
    made, _ = decoding(steps=raising(error))
    for _ in range(2):
        samples = run(made, [np.arange(9)], PARAMS)
        assert [s.tokens for s in samples] == [alone(np.arange(9), PARAMS, s.index) for s in samples]
    assert caplog.messages == [f"decoding step by step: {error}"]
    assert made.report.graph_steps == made.report.captures == 0
    assert_all_given_back(made)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
        RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture"),
    ],
)
def test_what_cannot_be_captured_decodes_step_by_step(decoding, caplog, error):
    made, _ = decoding(Capturing(error))
    samples = run(made, [np.arange(9)], PARAMS)
    assert [s.tokens for s in samples] == [alone(np.arange(9), PARAMS, s.index) for s in samples]
    assert f"decoding step by step: a step cannot be captured in a CUDA graph: {error}" in caplog.text
    assert_all_given_back(made)


@pytest.mark.parametrize("type_", [torch.AcceleratorError, RuntimeError])
@pytest.mark.parametrize("fails", [1, 2])
def test_a_fault_is_raised_with_its_own_message(decoding, caplog, type_, fails):
    made, _ = decoding(Capturing(type_("CUDA error: an illegal memory access was encountered"), fails))
    params = SamplingParams(n=8, max_new_tokens=14, seed=2, stop_token_ids=tuple(range(6)))
    with pytest.raises(type_, match=r"^CUDA error: an illegal memory access"):
        run(made, [np.arange(9)], params)
    assert "step by step" not in caplog.text and "going on" not in caplog.text
    assert_all_given_back(made)


def test_without_memory_for_a_graph_it_decodes_step_by_step(decoding, caplog):
    made, _ = decoding(Capturing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")))
    samples = run(made, [np.arange(9)], PARAMS)
    assert [s.tokens for s in samples] == [alone(np.arange(9), PARAMS, s.index) for s in samples]
    assert caplog.messages == [
        "decoding step by step: no memory for CUDA graphs of 2 rows: CUDA out of memory. Tried to allocate 2 GiB."
    ]
    assert made.runner.graphs.captures == made.report.graph_steps == 0
    assert_all_given_back(made)


def test_without_memory_for_the_steps_before_a_capture_nothing_of_it_stays(decoding, caplog):
    def arrays():
        return [one for one in gc.get_objects() if isinstance(one, GraphArrays)]

    gc.collect()
    before, there = {id(one) for one in arrays()}, []

    def no_memory(model, step):
        there.extend(weakref.ref(one) for one in arrays() if id(one) not in before)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    made, _ = decoding(steps=no_memory)
    samples = run(made, [np.arange(9)], PARAMS)
    assert [s.tokens for s in samples] == [alone(np.arange(9), PARAMS, s.index) for s in samples]
    assert "decoding step by step: no memory for CUDA graphs of 2 rows" in caplog.text
    assert there and not any(one() for one in there), "the arrays are gone while the runner is still there"
    assert_all_given_back(made)
