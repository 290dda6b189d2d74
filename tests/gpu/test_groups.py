"""GQA groups and head sizes beside the usual ones on the GPU, planned as a step's are: against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.tree_attention.workloads import GROUPS, workload
from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import build_step
from prefixkit.attention.variants import CAUSAL, Variant, compose, register, sliding_window, soft_cap
from prefixkit.ops import backend
from prefixkit.testing.forests import Case, random_case
from prefixkit.testing.gpu_forests import fill
from tests.gpu.blocks import measure, sample
from tests.gpu.cases import GPU, head_major, poison
from tests.gpu.oracle import Errors, dense

SIZES = (3, 5, 8, 9, 12, 15, 16, 17, 24)
CAPPED = compose(sliding_window(40), soft_cap(3.0))
FORESTS = [
    *((dim, torch.bfloat16, CAUSAL) for dim in (64, 80, 96, 112, 128, 256)),
    *((dim, *rest) for dim in (64, 96, 128, 256) for rest in ((torch.float16, CAUSAL), (torch.bfloat16, CAPPED))),
]


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "cuda")


def attend(case: Case, of: Variant = CAUSAL) -> tuple[Tensor, Tensor]:
    """The op over a plan of the backend's planner; two runs agree bit by bit."""
    tokens, device = np.zeros(case.queries.num_rows, dtype=np.int64), case.k_pages.device
    planner = backend.backend_for(device).planner_for(case.shape, device, case.q.dtype)
    step = build_step(StepTree(case.snapshot, case.queries), tokens, tokens[:0], planner, device)
    poison(1 << 18)
    call = case.q, case.k_pages, case.v_pages, step.positions, step.plan, case.scale, register(of)
    (out, lse), (again, _) = (torch.ops.prefixkit.tree_attention(*call) for _ in range(2))
    assert torch.equal(out, again)
    return out, lse


@pytest.mark.parametrize(("heads", "kv_heads", "name"), GROUPS)
def test_trees_of_the_benchmark(heads: int, kv_heads: int, name: str) -> None:
    work, rng = workload(name, heads, kv_heads), np.random.default_rng(heads)
    pages = int(work.snapshot.page_indptr[-1])
    case = fill(rng, work.snapshot, pages, work.queries, (heads, kv_heads, work.head_dim), torch.bfloat16, GPU)
    out, lse = attend(case)
    assert bool(torch.isfinite(lse).all())
    found = measure(case, out, lse, sample(rng, case, whole=2, single=12, most=64))
    assert found.ratio <= 1.5 and found.lse <= 1.0, found


@pytest.mark.parametrize(("head_dim", "dtype", "of"), FORESTS, ids=lambda value: getattr(value, "name", str(value)))
def test_forests_err_no_more_than_torchs_arithmetic(head_dim: int, dtype: torch.dtype, of: Variant) -> None:
    errors, seed = Errors(), int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    for number, group in enumerate(SIZES):
        rng = np.random.default_rng([seed, number])
        kv_heads = int(rng.choice([1, 2, 3]))
        case = random_case(rng, dtype, (kv_heads * group, kv_heads, head_dim), plain=number % 3 == 2)
        (exact, exact_lse), (rounded, _) = dense(case, of), dense(case, of, dtype)
        on_gpu = Case(
            case.snapshot, case.queries, case.q.to(GPU), head_major(case.k_pages), head_major(case.v_pages), case.scale
        )
        out, lse = attend(on_gpu, of)
        least = torch.finfo(dtype).eps / 4 * exact.abs().max()
        off = (rounded.double() - exact).abs().max()
        errors.add(number, case, float((out.double() - exact).abs().max()), float(max(off, least)))
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    errors.check()
