"""Pages of K and V in e4m3: what is written to them, and attention over what they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.backends.torch.host_planner import bind
from prefixkit.backends.torch.plain_kv import append, rotate
from prefixkit.ops import library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.ops.arguments import FP8, BadDtype
from prefixkit.testing.forests import plan_of, random_case

OPS = torch.ops.prefixkit
NUMBERS = [0.0, 1.0, -1.06, 448.0, 464.0, 500.0, -1e30, torch.inf, 2**-6, 2**-9, 2**-11, torch.nan]
ROUNDED = [0.0, 1.0, -1.0, 448.0, 448.0, 448.0, -448.0, 448.0, 2**-6, 2**-9, 0.0, torch.nan]


def nearest(x: Tensor) -> Tensor:
    """The nearest number of e4m3, the even one of two, by all of them."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    every = every[every.isfinite()]
    gap = (x.double()[..., None] - every).abs()
    near = gap <= gap.amin(-1, keepdim=True)
    even = torch.arange(256, dtype=torch.uint8)[torch.arange(256, dtype=torch.uint8).view(FP8).double().isfinite()] % 2
    return every[(near * (2 - even)).argmax(-1)].to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_major", [False, True], ids=["token-major", "head-major"])
def test_rows_are_rounded_to_the_nearest_number_and_large_ones_to_the_largest(
    dtype: torch.dtype, head_major: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (4, 3, 8, 16) if head_major else (4, 8, 3, 16)
    k_pages, v_pages = (torch.full(shape, torch.nan).to(FP8) for _ in "kv")
    if head_major:
        k_pages, v_pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    key, value = (torch.randn(5, 3, 16, generator=generator) * 10).to(dtype), torch.zeros(5, 3, 16, dtype=dtype)
    slots = torch.tensor([3, 31, -1, 8, 0])
    value[0, 0, : len(NUMBERS)] = torch.tensor(NUMBERS).to(dtype)
    before = k_pages.clone()
    OPS.kv_append(key, value, k_pages, v_pages, slots)
    written = slots[slots >= 0]
    held = k_pages[written // 8, written % 8].to(dtype)
    torch.testing.assert_close(held, nearest(key[slots >= 0]), rtol=0, atol=0)
    expected = torch.tensor(ROUNDED).to(dtype)
    torch.testing.assert_close(v_pages[0, 3, 0, : len(NUMBERS)].to(dtype), expected, rtol=0, atol=0, equal_nan=True)
    others = [slot for slot in range(32) if slot not in slots.tolist()]
    assert torch.equal(*(of.flatten(0, 1)[others].view(torch.uint8) for of in (before, k_pages)))


def test_keys_are_rotated_before_they_are_rounded() -> None:
    generator = torch.Generator().manual_seed(1)
    q, key, value = torch.randn(3, 5, 2, 16, generator=generator).bfloat16()
    cos, sin = torch.randn(2, 5, 16, generator=generator).bfloat16()
    pages, slots = [torch.zeros(2, 8, 2, 16).to(FP8) for _ in "kv"], torch.arange(5)
    turned = OPS.rotary_append(q, key, value, cos, sin, *pages, slots)
    assert torch.equal(turned, rotate(q, cos, sin))
    expected = torch.zeros(2, 8, 2, 16).to(FP8)
    append("kv_append", (rotate(key, cos, sin),), (expected,), slots)
    assert torch.equal(pages[0].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_attention_is_that_over_the_numbers_that_pages_hold(seed: int, dtype: torch.dtype) -> None:
    """The same numbers in pages of the queries' dtype give the same result, to the last bit."""
    print("seed", seed)
    case = random_case(np.random.default_rng(seed), heads=(6, 3, 32))
    rounded = [pages.to(FP8) for pages in (case.k_pages, case.v_pages)]
    wide = [pages.to(dtype) for pages in rounded]
    found = []
    for k_pages, v_pages in (rounded, wide):
        shape = HeadShape(6, 3, 32, 4)
        step = bind(plan_of(case, CPU_COST), StepTree(case.snapshot, case.queries), shape)
        given = case.q.to(dtype), k_pages, v_pages, case.positions, step.tensors, case.scale, "causal"
        found.append(OPS.tree_attention(*given))
    assert found[0][0].dtype == dtype
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


def test_rows_that_do_not_fit_each_other_are_named() -> None:
    pages, slots = [torch.zeros(2, 8, 2, 16).to(FP8) for _ in "kv"], torch.arange(5)
    key = torch.zeros(5, 2, 16)
    with pytest.raises(BadDtype, match=r"kv_append: value must be torch\.float32"):
        OPS.kv_append(key, key.half(), *pages, slots)
    with pytest.raises(
        BadDtype, match=r"kv_append: key must be torch\.float32 or torch\.bfloat16 or torch\.float16 beside"
    ):
        OPS.kv_append(key.to(FP8), key.to(FP8), *pages, slots)
    with pytest.raises(BadDtype, match=r"rotary_append: cos must be torch\.float32"):
        OPS.rotary_append(key, key, key, key[:, 0].half(), key[:, 0].half(), *pages, slots)
