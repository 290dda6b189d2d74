"""The cores that the Hydragen benchmark compares, on the GPU: their answers; one captured graph serves all lengths."""

from __future__ import annotations

import pytest
import torch

from benchmarks.hydragen.cases import Case
from benchmarks.hydragen.methods import METHODS
from benchmarks.hydragen.step import Rig, complaints, differences
from benchmarks.runner import captured
from benchmarks.shapes import Shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CASE = Case(((1, 300), (4, 50)), batch=32, new=20, private=7)


def rig_of(kv_heads: int) -> Rig:
    return Rig(Shape("small", 512, 2, 8, kv_heads, 1024, 1000), torch.device("cuda", 0), capacity=1 << 28)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_all_methods_compute_the_same(kv_heads: int) -> None:
    found = differences(rig_of(kv_heads))
    assert not complaints(found), found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_replayed_step_chooses_the_tokens_of_the_same_step_run_eagerly(method: str, kv_heads: int) -> None:
    rig = rig_of(kv_heads)
    state = rig.state(CASE)
    tokens = state.step.tokens.clone()
    with torch.no_grad():
        core = rig.core(method, state)
        step = rig.step(core)
        core.at(1)
        with core.installed():
            graph = captured(step)
        for new in (20, 3):
            core.at(new)
            chosen = []
            for forward in (graph.replay, step):
                state.step.tokens.copy_(tokens)
                with core.installed():
                    forward()
                chosen.append(state.step.tokens.clone())
            assert torch.equal(*chosen), new


def test_compiled_modules_are_measured_for_every_method() -> None:
    rig = rig_of(2)
    state = rig.state(CASE)
    found = {name: rig.measure(name, state, compiled=True) for name in METHODS}
    assert all("step_ms" in row for row in found.values()), found
