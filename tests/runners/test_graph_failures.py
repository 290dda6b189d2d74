"""What no graph can hold decodes step by step; a fault is raised; neither loses a page."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from prefixkit.ops.backend import NotCapturable
from prefixkit.runners import graph as graphs
from prefixkit.runners.decoder import CannotDecode
from prefixkit.sampling.params import SamplingParams
from tests.engine.runs import alone, assert_all_given_back, run
from tests.runners.stand_ins import Capturing, with_capture

PARAMS = SamplingParams(n=2, max_new_tokens=7, seed=1)


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


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
        RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture"),
    ],
)
def test_what_cannot_be_captured_decodes_step_by_step(decoding, caplog, error):
    made, _ = decoding()
    with_capture(made, Capturing(error))
    samples = run(made, [np.arange(9)], PARAMS)
    assert [s.tokens for s in samples] == [alone(np.arange(9), PARAMS, s.index) for s in samples]
    assert f"decoding step by step: a step cannot be captured in a CUDA graph: {error}" in caplog.text
    assert_all_given_back(made)


@pytest.mark.parametrize("type_", [torch.AcceleratorError, RuntimeError])
@pytest.mark.parametrize("fails", [1, 2])
def test_a_fault_is_raised_with_its_own_message(decoding, caplog, type_, fails):
    made, _ = decoding()
    with_capture(made, Capturing(type_("CUDA error: an illegal memory access was encountered"), fails))
    params = SamplingParams(n=8, max_new_tokens=14, seed=2, stop_token_ids=tuple(range(6)))
    with pytest.raises(type_, match=r"^CUDA error: an illegal memory access"):
        run(made, [np.arange(9)], params)
    assert "step by step" not in caplog.text and "going on" not in caplog.text
    assert_all_given_back(made)


def test_without_memory_for_a_graph_it_decodes_step_by_step(decoding, caplog):
    made, _ = decoding()
    decoder = with_capture(made, Capturing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")))
    samples = run(made, [np.arange(9)], PARAMS)
    assert [s.tokens for s in samples] == [alone(np.arange(9), PARAMS, s.index) for s in samples]
    assert caplog.messages == [
        "decoding step by step: no memory for CUDA graphs of 2 rows: CUDA out of memory. Tried to allocate 2 GiB."
    ]
    assert made.decoder is None and decoder.captures == 0
    assert_all_given_back(made)


def test_without_memory_for_the_steps_before_a_capture_nothing_of_it_stays(decoding, caplog):
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
