"""Sums and gathers of two processes, as torch sees them: results, refusals, and that no CPU computes them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import prefixkit.backends  # noqa: F401  (registers them)
from prefixkit.ops.arguments import BadDtype, BadShape
from prefixkit.ops.backend import BackendError
from prefixkit.ops.library import NoBackward

ops = torch.ops.prefixkit
part_of_product, sum_parts, gather_parts = ops.part_of_product, ops.sum_parts, ops.gather_parts
ADDRESSES = torch.zeros(5, dtype=torch.int64)
PART = torch.zeros(3, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sum_is_like_its_part_in_its_dtype_with_and_without_residuals(dtype):
    with FakeTensorMode(allow_non_fake_inputs=True):
        part, residual = torch.empty(2, 3, 8), torch.empty(2, 3, 8, dtype=dtype)
        for residuals in ((), (None,), (residual,), (residual, residual)):
            total = sum_parts(part, ADDRESSES, dtype, *residuals)
            assert (total.shape, total.dtype, total.is_contiguous()) == (part.shape, dtype, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_part_of_a_product_is_not_rounded(dtype):
    x, weight = (torch.randn(*shape).to(dtype) for shape in ((2, 3, 16), (8, 16)))
    part = part_of_product(x, weight)
    assert part.dtype == torch.float32 and part.is_contiguous()
    torch.testing.assert_close(part.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)
    with FakeTensorMode():
        x, weight = torch.empty(3, 16, dtype=dtype), torch.empty(8, 16, dtype=dtype)
        assert part_of_product(x, weight).shape == (3, 8)


@pytest.mark.parametrize("shape", [(2, 3, 8), (0, 8), (8,)])
def test_a_gather_is_twice_as_wide_as_its_part(shape):
    with FakeTensorMode(allow_non_fake_inputs=True):
        whole = gather_parts(torch.empty(shape, dtype=torch.bfloat16), ADDRESSES, 1)
        assert (whole.shape, whole.dtype, whole.is_contiguous()) == ((*shape[:-1], 16), torch.bfloat16, True)
        part = torch.empty(shape)
        assert gather_parts(part, ADDRESSES, 0, torch.empty_like(part)).shape == (*shape[:-1], 16)


@pytest.mark.parametrize("residuals", [(), (None,), (PART,), (PART, PART)], ids=["none given", "none", "one", "two"])
def test_plain_torch_has_no_such_memory(residuals):
    with pytest.raises(BackendError, match="all_reduce"):
        sum_parts(PART, ADDRESSES, torch.float32, *residuals)
    for sent in ((), (PART,)):
        with pytest.raises(BackendError, match="all_gather"):
            gather_parts(PART, ADDRESSES, 0, *sent)


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((torch.zeros(3, 7), ADDRESSES, F32), BadShape, r"part must have shape .*16 bytes in .*32, got \[3, 7\]"),
        ((torch.zeros(3, 4), ADDRESSES, BF16), BadShape, r"part must have shape .*16 bytes in .*bfloat16, got"),
        ((torch.zeros(8, 8).t(), ADDRESSES, F32), BadShape, "part must have shape .*contiguous"),
        ((PART.to(BF16), ADDRESSES, BF16), BadDtype, "part must be torch.float32"),
        ((PART, ADDRESSES, torch.int32), BadDtype, "dtype must be"),
        ((PART, ADDRESSES[:4], F32), BadShape, "addresses must have shape"),
        ((PART, ADDRESSES, F32, PART[:1]), BadShape, r"residual must have shape \[3, 8\] like part"),
        ((PART, ADDRESSES, F32, PART[0]), BadShape, r"residual .* got \[8\]"),
        ((PART, ADDRESSES, F32, torch.zeros(8, 3).t()), BadShape, "residual .*contiguous"),
        ((PART, ADDRESSES, BF16, PART), BadDtype, "residual must be torch.bfloat16"),
        ((PART, ADDRESSES, F32, PART, PART[:1]), BadShape, r"other must have shape \[3, 8\] like part"),
        ((PART, ADDRESSES, F32, None, PART), ValueError, "other is added besides residual"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given, error, message):
    with pytest.raises(error, match=f"sum_parts: {message}"):
        sum_parts(*given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((PART, torch.zeros(4, 7)), BadShape, r"x must have shape \[..., 7\] \(width of weight\), got \[3, 8\]"),
        ((PART, torch.zeros(8)), BadShape, r"weight must have shape \[columns, width\]"),
        ((PART, torch.zeros(4, 8, dtype=BF16)), BadDtype, "x must be torch.bfloat16 like weight"),
        ((PART, torch.zeros(4, 8, dtype=torch.int32)), BadDtype, "weight must be"),
    ],
)
def test_arguments_of_a_part_of_a_product_that_do_not_fit_are_refused(given, error, message):
    with pytest.raises(error, match=f"part_of_product: {message}"):
        part_of_product(*given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((torch.zeros(3, 7), ADDRESSES, 0), BadShape, r"part must have shape .*16 bytes in .*32, got \[3, 7\]"),
        ((torch.zeros(8, 8).t(), ADDRESSES, 0), BadShape, "part must have shape .*contiguous"),
        ((torch.zeros(8, 8, dtype=torch.int32), ADDRESSES, 0), BadDtype, "part must be"),
        ((PART, ADDRESSES[:4], 0), BadShape, "addresses must have shape"),
        ((PART, ADDRESSES, 2), ValueError, "rank must be 0 or 1, got 2"),
        ((PART, ADDRESSES, 0, PART[:1]), BadShape, r"sent must have shape \[3, 8\] like part, contiguous, got"),
        ((PART, ADDRESSES, 0, torch.zeros(8, 3).t()), BadShape, "sent .*contiguous"),
        ((PART, ADDRESSES, 0, PART.half()), BadDtype, "sent must be torch.float32"),
    ],
)
def test_arguments_of_a_gather_that_do_not_fit_are_refused(given, error, message):
    with pytest.raises(error, match=f"gather_parts: {message}"):
        gather_parts(*given)


def test_gradients_are_refused():
    with pytest.raises(NoBackward, match="inference_mode"):
        part_of_product(PART, PART.clone().requires_grad_())
    with pytest.raises(NoBackward, match="inference_mode"):
        sum_parts(PART, ADDRESSES, F32, PART.clone().requires_grad_())
    with pytest.raises(NoBackward, match="inference_mode"):
        gather_parts(PART.clone().requires_grad_(), ADDRESSES, 0)
