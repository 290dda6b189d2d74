"""Which backend a step is of: decided when it is planned, with a line of the log where it is not the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from prefixkit.attention.planner import Planner
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import Step, build_step
from prefixkit.attention.variants import register, variant
from prefixkit.backends.cuda.attention import TreeAttention
from prefixkit.backends.cuda.device_planner import WORK_TENSORS, planner_for, say_plain_torch
from prefixkit.backends.torch.host_planner import TorchPlanner
from prefixkit.ops.arguments import BadShape
from prefixkit.ops.backend import NotCapturable
from tests.attention.planners import PLANNERS, SHAPE, cpu_planner, cuda_planner, grown_tree, runs
from tests.fake_gpu import pretend


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A GPU as far as torch says, and nothing said of it yet."""
    pretend(monkeypatch, (9, 0))
    say_plain_torch.clear()


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "plain torch" in record.getMessage()]


def step_of(planner: Planner) -> Step:
    """Two leaves below a prompt of five tokens."""
    tree, _ = grown_tree()
    return build_step(StepTree(tree.snapshot(), runs((1, 0, 1), (2, 0, 1))), np.zeros(2), np.arange(2), planner)


def arguments(step: Step, variant: str, dtype: torch.dtype = torch.bfloat16, plan=None):
    numbers = torch.Generator().manual_seed(0)
    heads, kv_heads, head_dim = SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim
    shapes = (2, heads, head_dim), (64, 4, kv_heads, head_dim), (64, 4, kv_heads, head_dim)
    q, k, v = (torch.randn(shape, generator=numbers).to(dtype) for shape in shapes)
    return q, k, v, step.positions, step.plan if plan is None else plan, 0.3, variant, None


HALVED = variant(lambda score, b, h, q, kv: score * 0.5, name="halved", traced=False)


def halved() -> str:
    """A variant that is not traced."""
    return register(HALVED)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "why"),
    [
        (128, torch.float32, "float32 has no kernel"),
        (72, torch.bfloat16, "head size 72 has no kernel"),
        (272, torch.float16, "head size 272 has no kernel"),
    ],
)
def test_what_no_kernel_serves_is_planned_for_plain_torch_and_said_once(head_dim, dtype, why, caplog):
    shape, gpu = HeadShape(8, 2, head_dim, dtype.itemsize), torch.device("cuda", 0)
    assert all(isinstance(planner_for(shape, gpu, dtype), TorchPlanner) for _ in range(3))
    assert said(caplog) == [f"tree_attention runs in plain torch: {why}"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_that_is_planned_for_plain_torch_runs_there_whatever_its_layers_ask_for(dtype, caplog):
    step, attend = step_of(cpu_planner()), TreeAttention()
    for key in ("causal", halved()):
        expected = torch.ops.prefixkit.tree_attention(*arguments(step, key, dtype))
        assert all(map(torch.equal, attend(*arguments(step, key, dtype)), expected))
    assert not said(caplog), "its planner has said so"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_known_at_a_call_alone_runs_in_plain_torch_by_a_plan_made_then(dtype, caplog):
    """A variant without a CUDA body, or pages of another dtype than the planner's."""
    step, key, attend = step_of(cuda_planner()), halved(), TreeAttention()
    assert step.plans[0].owners is None, "nothing of plain torch is made with the step"
    plain = step_of(cpu_planner())
    expected = torch.ops.prefixkit.tree_attention(*arguments(plain, key, dtype))
    first, second = (attend(*arguments(step, key, dtype)) for _ in range(2))  # two layers
    torch.testing.assert_close(first, expected, rtol=2e-2, atol=2e-2)
    assert all(map(torch.equal, first, second))
    made = step.plans[0].owners
    attend(*arguments(step, key, dtype))
    assert made is not None and step.plans[0].owners is made, "once for the step"
    why = "float32 has no kernel" if dtype == torch.float32 else "variant 'halved' is not traced"
    assert len(said(caplog)) == 1 and why in said(caplog)[0]


def test_a_plan_in_the_tensors_of_a_graph_is_for_the_kernels_alone():
    step = step_of(cuda_planner())
    plan = [*step.plan[:WORK_TENSORS], *(tensor.clone() for tensor in step.plan[WORK_TENSORS:])]
    with pytest.raises(NotCapturable, match="nor a variant that was not traced; run eagerly"):
        TreeAttention()(*arguments(step, halved(), plan=plan))


def test_tensors_that_are_no_plan_are_refused():
    step = step_of(cuda_planner())
    for plan, named in ((step.plan[:3], "work"), (step.plan[:10], "nodes")):
        with pytest.raises(BadShape, match=rf"{named} must be the \d tensors .*, got 3"):
            TreeAttention()(*arguments(step, halved(), plan=plan))


@pytest.mark.parametrize("make", PLANNERS.values(), ids=PLANNERS)
def test_a_step_has_the_tensors_of_one_backend(make):
    devices = {tensor.dtype for tensor in step_of(make()).plan}
    assert len(devices) == 1
