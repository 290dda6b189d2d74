"""Sums and gathers of two processes, as torch sees them: results, refusals, and that no CPU computes them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import prefixkit.backends  # noqa: F401  (registers them)
from prefixkit.ops.arguments import BadDtype, BadShape
from prefixkit.ops.backend import BackendError
from prefixkit.ops.library import NoBackward

sum_parts, gather_parts = torch.ops.prefixkit.sum_parts, torch.ops.prefixkit.gather_parts
ADDRESSES = torch.zeros(5, dtype=torch.int64)
PART = torch.zeros(3, 8)


def test_a_sum_is_like_its_part_with_and_without_a_residual():
    with FakeTensorMode(allow_non_fake_inputs=True):
        part = torch.empty(2, 3, 8, dtype=torch.bfloat16)
        for residual in ((), (None,), (part,)):
            total = sum_parts(part, ADDRESSES, *residual)
            assert (total.shape, total.dtype, total.is_contiguous()) == (part.shape, part.dtype, True)
            assert total is not part


@pytest.mark.parametrize("shape", [(2, 3, 8), (0, 8), (8,)])
def test_a_gather_is_twice_as_wide_as_its_part(shape):
    with FakeTensorMode(allow_non_fake_inputs=True):
        whole = gather_parts(torch.empty(shape, dtype=torch.bfloat16), ADDRESSES, 1)
        assert (whole.shape, whole.dtype, whole.is_contiguous()) == ((*shape[:-1], 16), torch.bfloat16, True)


@pytest.mark.parametrize("residual", [(), (None,), (PART,)], ids=["none given", "none", "one"])
def test_plain_torch_has_no_such_memory(residual):
    with pytest.raises(BackendError, match="all_reduce"):
        sum_parts(PART, ADDRESSES, *residual)
    with pytest.raises(BackendError, match="all_gather"):
        gather_parts(PART, ADDRESSES, 0)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((torch.zeros(3, 7), ADDRESSES), BadShape, r"part must have shape .*16 bytes, got \[3, 7\]"),
        ((torch.zeros(8, 8).t(), ADDRESSES), BadShape, "part must have shape .*contiguous"),
        ((PART, ADDRESSES[:4]), BadShape, "addresses must have shape"),
        ((PART, ADDRESSES, PART[:1]), BadShape, r"residual must have shape \[3, 8\] like part"),
        ((PART, ADDRESSES, PART[0]), BadShape, r"residual .* got \[8\]"),
        ((PART, ADDRESSES, torch.zeros(8, 3).t()), BadShape, "residual .*contiguous"),
        ((PART, ADDRESSES, PART.half()), BadDtype, "residual must be torch.float32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given, error, message):
    with pytest.raises(error, match=f"sum_parts: {message}"):
        sum_parts(*given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((torch.zeros(3, 7), ADDRESSES, 0), BadShape, r"part must have shape .*16 bytes, got \[3, 7\]"),
        ((torch.zeros(8, 8).t(), ADDRESSES, 0), BadShape, "part must have shape .*contiguous"),
        ((torch.zeros(8, 8, dtype=torch.int32), ADDRESSES, 0), BadDtype, "part must be"),
        ((PART, ADDRESSES[:4], 0), BadShape, "addresses must have shape"),
        ((PART, ADDRESSES, 2), ValueError, "rank must be 0 or 1, got 2"),
    ],
)
def test_arguments_of_a_gather_that_do_not_fit_are_refused(given, error, message):
    with pytest.raises(error, match=f"gather_parts: {message}"):
        gather_parts(*given)


def test_gradients_are_refused():
    with pytest.raises(NoBackward, match="inference_mode"):
        sum_parts(PART, ADDRESSES, PART.clone().requires_grad_())
    with pytest.raises(NoBackward, match="inference_mode"):
        gather_parts(PART.clone().requires_grad_(), ADDRESSES, 0)
