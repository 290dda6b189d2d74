"""Trees far larger than the random forests: many leaves, long chains, a prefix of a million tokens, long prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prefixkit.attention.gpu_plan import H200_COST

from benchmarks.tree_attention.prefill import Prompts
from benchmarks.tree_attention.workloads import workload
from prefixkit.attention.bsr import Queries
from prefixkit.ops import backend
from prefixkit.tree.snapshot import TreeSnapshot
from tests.gpu.blocks import measure, sample
from tests.gpu.cases import GPU
from tests.gpu.forests import attend, fill, step_of

HEAD_DIM = 128
DECODE = [
    (8, 1, "2L b32768 p4096 s64"),
    (32, 8, "2L b8192 p1024 s128"),
    (32, 32, "2L b8192 p4096 s16"),
    (8, 1, "2L b1 p1048576 s128"),
    (32, 8, "2L b64 p1048576 s16"),
    (32, 32, "2L b64 p131072 s16"),
    (8, 1, "chain d64 b64 p2048 t32"),
    (32, 8, "comb d64 b8 t64 s128"),
]
PROMPTS = [
    (32, 8, Prompts("prompt of 32K", 32768, 32768)),
    (8, 1, Prompts("8K chunk at the end of 128K", 131072, 8192)),
    (32, 8, Prompts("8 x 1K after 16K", 1024, 1024, count=8, prefix=16384, prefix_asks=True)),
]


def check(snapshot: TreeSnapshot, queries: Queries, heads: int, kv_heads: int) -> None:
    """Two runs agree bit by bit, and a sample of rows errs no more than 1.5 times what torch's flash attention does."""
    multiprocessors = torch.cuda.get_device_properties(GPU).multi_processor_count
    rng = np.random.default_rng(heads * kv_heads)
    pages = int(snapshot.page_indptr[-1])
    case = fill(rng, snapshot, pages, queries, (heads, kv_heads, HEAD_DIM), torch.bfloat16, GPU)
    step = step_of(case, H200_COST, multiprocessors)
    out, lse = attend(case, step)
    assert bool(torch.isfinite(lse).all())
    again, _ = attend(case, step)
    assert torch.equal(out, again)
    found = measure(case, out, lse, sample(rng, case, whole=2, single=6, most=64))
    assert found.ratio <= 1.5 and found.lse <= 1.0, found


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "cuda")


@pytest.mark.parametrize(("heads", "kv_heads", "name"), DECODE)
def test_decode(heads: int, kv_heads: int, name: str) -> None:
    tree = workload(name, heads, kv_heads)
    check(tree.snapshot, tree.queries, heads, kv_heads)


@pytest.mark.parametrize(("heads", "kv_heads", "prompts"), PROMPTS, ids=lambda p: getattr(p, "name", str(p)))
def test_prefill(heads: int, kv_heads: int, prompts: Prompts) -> None:
    snapshot, queries = prompts.workload(heads, kv_heads).snapshot, prompts.queries()
    snapshot.ready[queries.node] = queries.begin
    check(snapshot, queries, heads, kv_heads)
