"""``tree_attention`` on the GPU: random forests against float64, all variants, errors, graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkit.attention import backend
from prefixkit.attention.checks import BadDtype, BadShape
from prefixkit.attention.variants import (
    CAUSAL,
    Variant,
    alibi,
    attention_sinks,
    compose,
    register,
    sliding_window,
    soft_cap,
)
from tests.attention.forests import FOLD_ALL, SHARE_ALL, Case, plan_of, random_case
from tests.gpu.cases import on_gpu, poison
from tests.gpu.oracle import dense, torch_error

# A rounding of the output that torch's error may happen to lack in a small case.
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@pytest.fixture(params=["cuda", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs with both backends."""
    monkeypatch.setenv(backend.VARIABLE, request.param)
    backend.ops_for.cache_clear()
    request.addfinalizer(backend.ops_for.cache_clear)
    name: str = request.param
    return name


def make(seed: int, dtype: torch.dtype) -> tuple[Case, dict[str, int]]:
    """A forest with heads that the kernels serve, and options of its plan."""
    rng = np.random.default_rng(seed)
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 4, 7, 8]))
    case = random_case(rng, dtype, (kv_heads * group, kv_heads, int(rng.choice([64, 128]))))
    options: list[dict[str, int]] = [{}, {"kv_heads": kv_heads, "num_workers": 5, "min_chunk": 8}, {"max_tile": 16}]
    return case, options[seed % len(options)]


def run(case: Case, options: dict[str, int], seed: int, variant: str = "causal") -> tuple[torch.Tensor, torch.Tensor]:
    call = on_gpu(case, plan_of(case, SHARE_ALL if seed % 2 else FOLD_ALL, **options))
    poison(1 << 18)
    out, lse = torch.ops.prefixkit.tree_attention(*call.arguments(variant))
    again, _ = torch.ops.prefixkit.tree_attention(*call.arguments(variant))
    assert torch.equal(out, again), "two runs differ"
    return out, lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_a_forest_errs_no_more_than_torch(implementation, dtype, seed):
    case, options = make(seed, dtype)
    out, lse = run(case, options, seed)
    exact, exact_lse = dense(case)
    bound = 1.5 * torch_error(case, exact) + HALF_ULP[dtype] * float(exact.abs().max())
    assert float((out.double() - exact).abs().max()) <= bound
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


def variants(heads: int, rng: np.random.Generator) -> list[Variant]:
    return [
        sliding_window(int(rng.integers(1, 12))),
        soft_cap(3.0),
        alibi(rng.random(heads)),
        attention_sinks(rng.standard_normal(heads)),
        compose(
            sliding_window(5), soft_cap(2.0), alibi(rng.random(heads)), attention_sinks(rng.standard_normal(heads))
        ),
        CAUSAL,
    ]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_variant_errs_no_more_than_torchs_arithmetic(implementation, number, dtype):
    for seed in (1, 2, 3):
        case, options = make(100 + seed, dtype)
        variant = variants(case.q.shape[1], np.random.default_rng(seed))[number]
        out, lse = run(case, options, seed, register(variant))
        exact, exact_lse = dense(case, variant)
        plain, _ = dense(case, variant, dtype)
        bound = 1.5 * float((plain.double() - exact).abs().max()) + HALF_ULP[dtype] * float(exact.abs().max())
        assert float((out.double() - exact).abs().max()) <= bound, variant.name
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-3 if dtype != torch.float32 else 1e-4)


def test_bad_arguments_are_named_before_anything_is_launched(implementation):
    case, options = make(0, torch.bfloat16)
    call = on_gpu(case, plan_of(case, SHARE_ALL, **options))
    q, k, v, positions, work, nodes, scale, key = call.arguments()
    attend = torch.ops.prefixkit.tree_attention
    with pytest.raises(BadDtype, match=r"q must be torch.bfloat16 like the pages"):
        attend(q.half(), k, v, positions, work, nodes, scale, key)
    with pytest.raises(BadShape, match="q_positions must have shape"):
        attend(q, k, v, positions[1:], work, nodes, scale, key)
    with pytest.raises(BadShape, match="work must be the 5 tensors"):
        attend(q, k, v, positions, work[:3], nodes, scale, key)
    with pytest.raises(BadDtype, match=r"nodes\.pages must be torch.int32"):
        attend(q, k, v, positions, work, [*nodes[:3], nodes[3].long(), nodes[4]], scale, key)
    with pytest.raises(ValueError, match="no variant is registered"):
        attend(q, k, v, positions, work, nodes, scale, "unheard of")
