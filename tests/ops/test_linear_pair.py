"""``linear_pair``: one product for few rows, two for many, and the same values."""

from __future__ import annotations

import pytest
import torch

from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape
from prefixkit.ops.library import NoBackward

ops = torch.ops.prefixkit
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def given(rows, dtype=torch.float32, width=16, columns=24):
    generator = torch.Generator().manual_seed(rows)
    shapes = (*rows, width) if isinstance(rows, tuple) else (rows, width)
    x, weight = (torch.randn(shape, generator=generator) for shape in (shapes, (columns, width)))
    return x.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 128, 129, 500])
def test_values_err_no_more_than_those_of_two_products(rows, dtype):
    x, weight = given(rows, dtype)
    truth = x.double() @ weight.double().T
    ours = ops.linear_pair(x, weight)
    theirs = torch.cat([torch.nn.functional.linear(x, half) for half in weight.chunk(2)], -1)
    assert ours.is_contiguous() and ours.dtype == dtype and ours.shape == (rows, 24)
    error = [(found.double() - truth).norm() for found in (ours, theirs)]
    assert error[0] <= 1.5 * error[1]


@pytest.mark.parametrize("rows", [(1, 5), (2, 100), (1, 300)], ids=str)
def test_rows_may_have_several_dimensions_and_any_strides(rows):
    x, weight = given(1), given(1)[1]
    x = torch.randn(16, *rows).movedim(0, -1)
    expected = torch.nn.functional.linear(x, weight)
    assert torch.allclose(ops.linear_pair(x, weight), expected, atol=1e-5)
    assert ops.linear_pair(x, weight).shape == expected.shape


@pytest.mark.parametrize("rows", [0, 3, 200])
def test_opcheck(rows):
    torch.library.opcheck(ops.linear_pair.default, given(rows))


WRONG = {
    "width": (
        lambda x, weight: (x[:, :8], weight),
        BadShape,
        r"x must have shape \[\.\.\., 16\] \(width of weight\), got \[3, 8\]",
    ),
    "x dtype": (lambda x, weight: (x.half(), weight), BadDtype, "x must be torch.float32 like weight"),
    "x device": (lambda x, weight: (x.to("meta"), weight), BadDevice, "x is on meta"),
    "odd columns": (lambda x, weight: (x, weight[1:]), BadShape, "weight must have shape .*columns of two equal"),
    "strides": (lambda x, weight: (x, weight.T.contiguous().T), BadShape, "weight must have shape .*contiguous"),
    "doubles": (lambda x, weight: (x.double(), weight.double()), BadDtype, "weight must be torch.float32 or"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what):
    change, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        ops.linear_pair(*change(*given(3)))


def test_a_gradient_is_refused():
    x, weight = given(3)
    with pytest.raises(NoBackward, match="inference_mode"):
        ops.linear_pair(x.requires_grad_(), weight)
