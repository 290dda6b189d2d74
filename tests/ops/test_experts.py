"""Products of rows with the matrices of their experts: what the op computes and refuses, and that torch knows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape

ops = torch.ops.prefixkit
EXPERTS, K, N, TOKENS, PER = 4, 16, 24, 10, 3


def arguments(
    dtype: torch.dtype = torch.float32, shared: bool = True, along_n: bool = True, bias: bool = True
) -> list[Any]:
    """Some pairs are of experts that do not exist, and an expert has no pair."""
    rows = TOKENS if shared else TOKENS * PER
    weight = torch.randn(EXPERTS, K, N) if along_n else torch.randn(EXPERTS, N, K).transpose(1, 2)
    index = torch.randint(0, EXPERTS - 1, (TOKENS, PER))
    index[3, 1], index[4, 0] = EXPERTS, -1
    return [
        torch.randn(rows, K).to(dtype),
        weight.to(dtype),
        torch.randn(EXPERTS, N).to(dtype) if bias else None,
        index,
        PER if shared else 1,
    ]


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, index: torch.Tensor, per: int) -> Any:
    """In float64, a pair at a time."""
    out = torch.zeros(index.numel(), weight.shape[2], dtype=torch.float64)
    for pair, expert in enumerate(index.flatten().tolist()):
        if 0 <= expert < len(weight):
            out[pair] = x[pair // per].double() @ weight[expert].double()
            out[pair] += 0 if bias is None else bias[expert].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shared", "along_n", "bias"), [(True, True, True), (False, False, True), (True, False, False)]
)
def test_each_pair_gets_the_product_of_its_row_and_its_expert(dtype, shared, along_n, bias):
    given = arguments(dtype, shared, along_n, bias)
    truth = exact(*given)
    out = ops.expert_product(*given)
    assert out.dtype == dtype and out.shape == (TOKENS * PER, N)
    assert not out[3 * PER + 1].any() and not out[4 * PER].any(), "experts that do not exist"
    # Each sum of 16 products and a bias, rounded: twice the rounding of its terms' magnitudes.
    bound = (
        2
        * torch.finfo(dtype).eps
        * exact(*(one.abs() if torch.is_tensor(one) and one is not given[3] else one for one in given))
    )
    assert ((out.double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias):
    torch.library.opcheck(ops.expert_product.default, tuple(arguments(bias=bias)))


@pytest.mark.parametrize(
    ("position", "wrong", "error", "message"),
    [
        (0, torch.randn(TOKENS, K, 1), BadShape, r"x must have shape \[rows, k\]"),
        (0, torch.randn(TOKENS, K + 1), BadShape, r"weight must have shape \[experts, 17, n\]"),
        (0, torch.randn(TOKENS + 1, K), BadShape, "index must have shape 3 pairs for each row of x"),
        (1, torch.randn(EXPERTS, K, N).double(), BadDtype, "weight must be torch.float32 like x"),
        (1, torch.randn(EXPERTS, K, 2 * N)[..., ::2], BadShape, "weight must have stride 1 over k or n"),
        (2, torch.randn(EXPERTS, N + 1), BadShape, r"bias must have shape \[4, 24\], contiguous"),
        (3, torch.zeros(TOKENS, PER, dtype=torch.int32), BadDtype, "index must be torch.int64"),
        (3, torch.zeros(PER, TOKENS, dtype=torch.int64).T, BadShape, "index must have shape .* contiguous"),
        (3, torch.zeros(TOKENS, PER, dtype=torch.int64, device="meta"), BadDevice, "index is on meta"),
    ],
)
def test_what_does_not_fit_is_refused(position, wrong, error, message):
    given = arguments()
    given[position] = wrong
    with pytest.raises(error, match=message):
        ops.expert_product(*given)
