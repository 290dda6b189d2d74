"""Products with experts on a GPU: alone, in CUDA graphs, and in the steps of a model."""

from __future__ import annotations

import math

import pytest
import torch

from prefixkit import Session
from prefixkit.models import patch
from tests.gpu.cases import GPU
from tests.models.tiny_families import make_model

ops = torch.ops.prefixkit


# gpt-oss-20b's and Qwen3-30B-A3B's second products; tiles that end; many rows of few experts.
SHAPES = {
    "gpt-oss": (32, 2880, 2880, 256, 4),
    "qwen3": (128, 768, 2048, 256, 8),
    "odd": (5, 200, 136, 37, 3),
    "one row": (32, 2880, 264, 1, 4),
    "many rows": (3, 136, 264, 3000, 2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("along_n", [False, True], ids=["along k", "along n"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_products_err_no_more_than_torch_and_graphs_hold_them(shape, along_n, dtype):
    experts, k, n, tokens, per = shape
    x = torch.randn(tokens, k, device=GPU).to(dtype)
    weight = torch.randn(experts, k, n, device=GPU) if along_n else torch.randn(experts, n, k, device=GPU).mT
    weight, bias = weight.to(dtype), torch.randn(experts, n, device=GPU).to(dtype)
    index = torch.randint(0, experts, (tokens, per), device=GPU)
    index[0, 0] = experts + 1
    out = ops.expert_product(x, weight, bias, index, per)
    exact, torchs = torch.zeros(2, tokens * per, n, dtype=torch.float64, device=GPU)
    for expert in range(experts):
        pairs = (index.flatten() == expert).nonzero()[:, 0]
        exact[pairs] = x[pairs // per].double() @ weight[expert].double() + bias[expert].double()
        torchs[pairs] = (x[pairs // per] @ weight[expert] + bias[expert]).double()
    assert not out[0].any()
    assert (out - exact).norm() <= 1.5 * (torchs - exact).norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = ops.expert_product(x, weight, bias, index, per)
    index.copy_(index.flip(0))
    again = ops.expert_product(x, weight, bias, index, per)
    graph.replay()
    assert torch.equal(held, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["as they are", "compiled"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("chosen", ["grouped_mm", "eager"])
def test_graphs_hold_steps_of_mixtures_of_experts(family, compiled, dtype, chosen):
    """Of 16 rows and of 64, where transformers' grouped product serves bfloat16 on some GPUs."""
    model = patch(make_model(family, seed=0, head_dim=64).to(GPU, dtype))
    model.config._experts_implementation = chosen  # eager: a loop for which the host waits
    with Session(model, kv_budget="64MiB", compiled=compiled) as session:
        for n in (8, 32):
            found = session.generate([[5, 6, 7], [5, 9]], n=n, seed=3, max_new_tokens=24, stop_token_ids=())
            assert found.report.captures > 0
            assert all(math.isfinite(logprob) for sample in found for logprob in sample.logprobs)
