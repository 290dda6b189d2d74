"""Pages of K and V in e4m3 by the kernels: against float64 over the numbers that the pages hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.variants import Variant, register, sliding_window
from prefixkit.backends.cuda.device_planner import CudaPlanner, planner_for
from prefixkit.backends.cuda.kernels import KERNEL_VARIABLE
from prefixkit.backends.torch import plain_kv
from prefixkit.engine.request import Request
from prefixkit.ops import backend
from prefixkit.ops.arguments import FP8
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from prefixkit.testing.forests import Case, random_case
from tests.attention.rotations import random_rows, random_slots
from tests.gpu.cases import GPU, forget_launches
from tests.gpu.oracle import Errors, dense, torch_error
from tests.gpu.test_model import model_of, prompts
from tests.gpu.test_portable import deep_case, heads_of
from tests.gpu.test_tree_attention import HALF_ULP, make, run

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=["own", "portable"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The GPU's own kernel, and the portable one."""
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    backend.choose_again()
    request.addfinalizer(backend.choose_again)
    if request.param == "portable":
        monkeypatch.setenv(KERNEL_VARIABLE, "portable")
    forget_launches(monkeypatch)
    return str(request.param)


def hold_against_torch(cases: list[tuple[int, Case, dict[str, int]]], variant: Variant | None = None) -> None:
    """Each case with pages in e4m3; torch computes on the same numbers in pages of the queries' dtype."""
    errors = Errors()
    for seed, case, options in cases:
        held = replace(case, k_pages=case.k_pages.to(FP8), v_pages=case.v_pages.to(FP8))
        wide = replace(held, k_pages=held.k_pages.to(case.q.dtype), v_pages=held.v_pages.to(case.q.dtype))
        if variant is None:
            out, lse = run(held, options, seed)
            exact, exact_lse = dense(wide)
            theirs = torch_error(wide, exact)
        else:
            out, lse = run(held, options, seed, register(variant))
            exact, exact_lse = dense(wide, variant)
            plain, _ = dense(wide, variant, case.q.dtype)
            least = HALF_ULP[case.q.dtype] * float(exact.abs().max())
            theirs = max(float((plain.double() - exact).abs().max()), least)
        errors.add(seed, wide, float((out.double() - exact).abs().max()), theirs)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    errors.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forests_err_no_more_than_torch(implementation, dtype, num_gpu_forests):
    hold_against_torch([(seed, *make(seed, dtype)) for seed in range(num_gpu_forests)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128])
def test_forests_of_every_group_err_no_more_than_torch(kernel, head_dim, dtype):
    cases = []
    for seed, group in enumerate((1, 4, 8, 12, 16, 71), head_dim):
        case = random_case(np.random.default_rng(seed), dtype, heads_of(np.random.default_rng(seed), group, head_dim))
        cases.append((seed, case, {} if seed % 2 else {"num_sms": 5}))
    hold_against_torch(cases)


@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (96, 4), (128, 1), (128, 4), (128, 8), (128, 16), (128, 71)])
def test_long_nodes_err_no_more_than_torch(kernel, head_dim, group):
    """More KV tiles than a loading warp has places for."""
    seeds = range(group, group + 2)
    hold_against_torch([(seed, deep_case(seed, dtype, group, head_dim), {}) for seed in seeds for dtype in DTYPES])


@pytest.mark.parametrize("head_dim", [16, 48, 256])
def test_head_sizes_of_the_portable_kernel_err_no_more_than_torch(kernel, head_dim):
    hold_against_torch([(seed, deep_case(seed, torch.bfloat16, 4, head_dim), {}) for seed in range(3)])


@pytest.mark.parametrize("window", [9, 100])
def test_windows_err_no_more_than_torchs_arithmetic(kernel, window):
    cases = [(seed, deep_case(seed, torch.bfloat16, group, 128), {}) for seed, group in enumerate((1, 4, 16))]
    hold_against_torch(cases, sliding_window(window))


@pytest.mark.parametrize("head_dim", [20, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
def test_kernels_that_append_write_what_torch_writes(kernel, dtype, head_dim):
    rng = np.random.default_rng(head_dim)
    rows, slots = random_rows(rng, dtype, 50, 6, 3, head_dim, GPU), random_slots(rng, 50, 96)
    slots[7] = -1
    rows[2].mul_(300)
    found, expected = ([torch.zeros(6, 3, 16, head_dim).to(FP8).transpose(1, 2) for _ in "kv"] for _ in range(2))
    found = [pages.to(GPU) for pages in found]
    torch.ops.prefixkit.kv_append(rows[1], rows[2], *found, slots.to(GPU))
    plain_kv.kv_append(rows[1].cpu(), rows[2].cpu(), *expected, slots)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    torch.ops.prefixkit.rotary_append(*rows, *found, slots.to(GPU))
    turned = plain_kv.rotate(rows[1], rows[3], rows[4])  # fused or not, within a rounding
    there = slots >= 0
    held = found[0].cpu().float()[slots[there] // 16, slots[there] % 16]
    torch.testing.assert_close(held, turned[there.to(GPU)].float().cpu(), rtol=2**-3, atol=2**-9)


def test_steps_are_planned_for_the_kernels(kernel):
    shape = HeadShape(32, 8, 128, FP8.itemsize)
    assert isinstance(planner_for(shape, GPU, torch.bfloat16), CudaPlanner)


def test_tokens_of_captured_graphs_are_those_of_single_steps(kernel):
    model = prefixkit.patch(model_of(128, torch.bfloat16), kv_dtype="fp8")
    settings = SamplingParams(n=8, temperature=0.8, max_new_tokens=40, seed=4)
    asked = [Request(i, np.array(prompt), settings) for i, prompt in enumerate(prompts(11))]
    fast, slow = make_engine(model, asked), make_engine(model, asked, graphs=False)
    found, expected = fast.run(asked), slow.run(asked)
    assert [sample.tokens for sample in found] == [sample.tokens for sample in expected]
    assert fast.report.graph_steps == fast.report.decode_steps == 39
