"""The cores that the Hydragen benchmark compares, on the GPU: their answers, and captured steps of every length."""

from __future__ import annotations

import pytest
import torch

from benchmarks.hydragen.experiments import Rig, differences
from benchmarks.hydragen.methods import METHODS, Case
from benchmarks.runner import captured
from benchmarks.shapes import Shape
from benchmarks.tree_attention.rivals import MOST_DIFFERENCE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CASE = Case(((1, 300), (4, 50)), batch=32, new=20, private=7)


def rig_of(kv_heads: int) -> Rig:
    return Rig(Shape("small", 512, 2, 8, kv_heads, 1024, 1000), torch.device("cuda", 0), capacity=1 << 28)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_all_methods_compute_the_same(kv_heads: int) -> None:
    found = differences(rig_of(kv_heads))
    assert all(isinstance(by, float) and by < MOST_DIFFERENCE for by in found.values()), found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_replayed_step_chooses_the_tokens_of_the_same_step_run_eagerly(
    method: str, kv_heads: int, compiled: bool
) -> None:
    rig = rig_of(kv_heads)
    core, planner = rig.core(method, CASE), rig.planner(METHODS[method].shares)
    step = rig.step(core, compiled)
    for new in (1, 20, 3):
        core.at(CASE.step(new, planner, rig.device))
        tokens, chosen = core.now.tokens.clone(), []
        with torch.no_grad(), core.installed():
            graph = captured(step)
            for forward in (graph.replay, step):
                core.now.tokens.copy_(tokens)
                forward()
                chosen.append(core.now.tokens.clone())
        assert torch.equal(*chosen), new


def test_compiled_modules_are_measured_for_every_method() -> None:
    rig = rig_of(2)
    found = {name: rig.measure(f"{name}, compiled", CASE) for name in METHODS}
    assert all("step_ms" in row for row in found.values()), found
