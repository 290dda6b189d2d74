"""Limits of rows in our kernels: what a query sees of its ancestors, and of later tokens of its own node."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.queries import StepTree
from prefixkit.attention.reference import visible_tokens
from prefixkit.attention.variants import CAUSAL, Variant, compose, register, sliding_window, soft_cap, variant
from prefixkit.backends.cuda.device_planner import CudaPlanner, planner_for
from prefixkit.backends.cuda.kernels import KERNEL_VARIABLE
from prefixkit.runners.decode_tree import DecodeTree, TreeCapacity
from prefixkit.runners.kind_plans import KindPlans
from prefixkit.testing.forests import SHARE_ALL, Case, fill, gpu_plan_of
from prefixkit.testing.gpu_forests import draw
from prefixkit.testing.named_trees import leaf_queries, tree_of
from prefixkit.testing.row_limits import with_row_limits
from tests.gpu.cases import GPU, OnGpu, forget_launches, item_rows, on_gpu, planned, poison
from tests.gpu.oracle import Errors, dense
from tests.gpu.test_tree_attention import HALF_ULP, make

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=["", "portable"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL_VARIABLE, request.param)
    forget_launches(monkeypatch)


def drawn() -> int:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return seed


def attend(call: OnGpu, of: Variant, *more: Tensor, classes: bool = False) -> tuple[Tensor, Tensor]:
    key = register(of)
    given, heads = list(call.arguments(key)), call.q.shape[1]
    given[4] = plan = [*call.plan, *more]
    if classes:
        _, page_size, kv_heads, head_dim = call.k_pages.shape
        shape = [heads, kv_heads, head_dim, head_dim]
        found = torch.ops.prefixkit.classify_blocks(call.q_positions, plan, shape, page_size, key)
        given[4] = [*plan[: len(call.plan) + 1], found, *plan[len(call.plan) + 2 :]]
    poison(1 << 18)
    return torch.ops.prefixkit.tree_attention(*given)


def sequences(case: Case) -> Tensor:
    return torch.from_numpy(StepTree(case.snapshot, case.queries).sequences).to(GPU)


def judge(errors: Errors, number: int, case: Case, found: tuple[Tensor, Tensor], of: Variant) -> None:
    (exact, exact_lse), (rounded, _) = dense(case, of), dense(case, of, case.q.dtype)
    off, least = (rounded.double() - exact).abs().max(), HALF_ULP[case.q.dtype] * exact.abs().max()
    errors.add(number, case, float((found[0].double() - exact).abs().max()), float(max(off, least)))
    torch.testing.assert_close(found[1].double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("under", ["causal", "window and cap", "documents"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_see_no_token_of_their_ancestors_behind_their_limits(dtype: torch.dtype, under: str) -> None:
    errors, seed = Errors(), drawn()
    for number in range(24):
        rng = np.random.default_rng([seed, number])
        case, options = make(int(rng.integers(2**31)), dtype)
        every = np.ones(case.snapshot.num_nodes, dtype=bool)
        plan = gpu_plan_of(case, SHARE_ALL, shared=every, **options | item_rows(case))
        case, plan, limits = with_row_limits(rng, case, plan, GPU)
        size = int(rng.integers(1, 60))
        of = {
            "causal": CAUSAL,
            "window and cap": compose(sliding_window(size), soft_cap(3.0)),
            "documents": variant(mask_mod=lambda b, h, q, kv, size=size: (q // size == kv // size) & (kv <= q)),
        }[under]
        found = attend(on_gpu(case, plan), of, sequences(case), classes=under != "causal" and number % 2 == 0)
        judge(errors, number, case, found, compose(limits, of))
    errors.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_limits_hold_in_large_forests(dtype: torch.dtype) -> None:
    errors, seed = Errors(), drawn() % 2**30
    for number in range(4):
        forest = draw(seed + number, GPU)
        if forest.case.q.dtype != dtype:
            continue
        rng, every = np.random.default_rng(seed + number), np.ones(forest.case.snapshot.num_nodes, dtype=bool)
        plan = gpu_plan_of(forest.case, SHARE_ALL, shared=every, num_sms=132)
        case, plan, limits = with_row_limits(rng, forest.case, plan, GPU)
        judge(errors, number, case, attend(on_gpu(case, plan), CAUSAL), limits)
    if errors.seeds:
        errors.check()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deep_trees_in_graphs_buffers_under_windows(dtype: torch.dtype) -> None:
    """Planned by paths on the GPU: tiles begin where one of their queries sees, over runs and trimmed leaves."""
    errors, seed = Errors(), drawn()
    names = "spine p100 d60 t1 s1-90", "spine p300 d40 t1-9 s1-40", "search p300 n400 t1-30"
    for number, name in enumerate(names):
        rng, snapshot = np.random.default_rng([seed, number]), tree_of(name)
        case = fill(rng, snapshot, len(snapshot.pages), leaf_queries(snapshot), (32, 8, 128), dtype)
        tree, of = StepTree(snapshot, case.queries), sliding_window(int(rng.integers(8, 300)))
        planner = planner_for(case.shape, GPU, dtype, of.visible)
        assert isinstance(planner, CudaPlanner)
        assert tree.is_deep
        if planner.launch is None:
            pytest.skip("this GPU's kernel has tiles that its planner does not know")
        buffers = DecodeTree(TreeCapacity.of(tree), snapshot.page_size, GPU)
        kind = KindPlans(
            planner.planner(buffers.capacity.nodes, planner.capacity_for(tree), GPU), planner, of.visible, buffers
        )
        buffers.upload(tree)
        kind.upload(tree)
        buffers.advance(tree.queries.num_rows)
        kind.advance()
        given = list(on_gpu(case, planned(case, SHARE_ALL)).arguments(register(of)))
        given[4] = kind.plan_of(tree).tensors
        poison(1 << 18)
        judge(errors, number, case, torch.ops.prefixkit.tree_attention(*given), of)
    errors.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_see_later_tokens_up_to_their_reach(dtype: torch.dtype) -> None:
    """A mask that shows every token: each query sees what one at its reach would see."""
    errors, seed = Errors(), drawn()
    everything = variant(mask_mod=lambda b, h, q, kv: kv >= 0, name="everything")
    for number in range(16):
        rng = np.random.default_rng([seed, number])
        case, options = make(int(rng.integers(2**31)), dtype)
        tree = StepTree(case.snapshot, case.queries)
        reach = reaching(rng, tree)
        none = torch.zeros(0, dtype=torch.int64, device=GPU)
        more = none, none, torch.from_numpy(reach).to(GPU)
        found = attend(on_gpu(case, planned(case, SHARE_ALL, **options)), everything, *more, classes=number % 2 == 0)
        exact, rounded, exact_lse = row_by_row(case, reach)
        off, least = (rounded - exact).abs().max(), HALF_ULP[dtype] * exact.abs().max()
        errors.add(number, case, float((found[0].double() - exact).abs().max()), float(max(off, least)))
        torch.testing.assert_close(found[1].double(), exact_lse, rtol=1e-5, atol=1e-4)
    errors.check()


def reaching(rng: np.random.Generator, tree: StepTree) -> np.ndarray:
    """``[rows]`` the last position that each query may see, which ascends in each node."""
    node, reach = tree.queries.row_node(), tree.positions.copy()
    last = tree.snapshot.start[node] + tree.length[node] - 1
    reach += rng.integers(0, last - reach + 1)
    for each in np.unique(node):
        reach[node == each] = np.maximum.accumulate(reach[node == each])
    return reach


def row_by_row(case: Case, reach: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query to all up to its reach: out in float64 and in the case's dtype, and log-sum-exps."""
    heads, kv_heads, page_size = case.q.shape[1], case.k_pages.shape[2], case.k_pages.shape[1]
    found = []
    for q, node, last in zip(case.q.to(GPU), case.row_node.tolist(), reach.tolist(), strict=True):
        slots = torch.from_numpy(visible_tokens(case.snapshot, node, last)[0])
        k, v = (
            t[slots // page_size, slots % page_size].to(GPU).repeat_interleave(heads // kv_heads, 1).transpose(0, 1)
            for t in (case.k_pages, case.v_pages)
        )
        row = []
        for dtype in (torch.float64, case.q.dtype):
            score = (k.to(dtype) @ q.to(dtype)[..., None])[..., 0] * case.scale
            lse = score.logsumexp(-1)
            row += [(torch.exp(score - lse[:, None])[:, None] @ v.to(dtype))[:, 0].double(), lse.double()]
        found.append(row)
    out, lse, rounded, _ = (torch.stack(each) for each in zip(*found, strict=True))
    return out, rounded, lse
