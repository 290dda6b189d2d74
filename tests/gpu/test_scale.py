"""Trees far larger than the random forests: many leaves, long chains, a prefix of a million tokens, long prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.tree_attention.workloads import DEEP
from prefixkit.attention.gpu.gpu_cost import H200_COST
from prefixkit.attention.queries import Queries
from prefixkit.ops import backend
from prefixkit.testing.gpu_forests import attend, fill, step_of
from prefixkit.testing.named_trees import leaf_queries, prompts, tree_of
from prefixkit.tree.snapshot import TreeSnapshot
from tests.gpu.blocks import measure, sample
from tests.gpu.cases import GPU

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
    *DEEP,
    (8, 1, "spine p512 d4095 t1-64 s1-8"),
    (32, 32, "search p10 n3000 t1-3"),
]
PROMPTS = [
    pytest.param(32, 8, {"tokens": 32768, "chunk": 32768}, id="prompt of 32K"),
    pytest.param(8, 1, {"tokens": 131072, "chunk": 8192}, id="8K chunk at the end of 128K"),
    pytest.param(
        32,
        8,
        {"tokens": 1024, "chunk": 1024, "count": 8, "prefix": 16384, "prefix_computed": False},
        id="8 x 1K after 16K",
    ),
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
    snapshot = tree_of(name)
    check(snapshot, leaf_queries(snapshot), heads, kv_heads)


@pytest.mark.parametrize(("heads", "kv_heads", "sizes"), PROMPTS)
def test_prefill(heads: int, kv_heads: int, sizes: dict[str, int]) -> None:
    check(*prompts(**sizes), heads, kv_heads)
