"""``tree_attention`` on the GPU: random forests against float64, all variants, errors, graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.variants import (
    CAUSAL,
    Variant,
    alibi,
    attention_sinks,
    compose,
    register,
    rounded_alibi,
    sigmoid,
    sliding_window,
    soft_cap,
    variant,
)
from prefixkit.backends.cuda.checked_mode import BadPlan
from prefixkit.backends.cuda.prepared_attention import UnsupportedHeads
from prefixkit.backends.torch.host_planner import NoSuchPlan
from prefixkit.ops import backend
from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape
from prefixkit.ops.backend import NotCapturable
from prefixkit.testing.forests import (
    SHARE_ALL,
    SHARE_NONE,
    Case,
    fill,
    gpu_plan_of,
    make_snapshot,
    node_tensors,
    random_case,
)
from tests.gpu.cases import GPU, on_gpu, planned, poison
from tests.gpu.oracle import Errors, dense, torch_error

# A rounding of the output that torch's error may happen to lack in a small case.
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def make(seed: int, dtype: torch.dtype) -> tuple[Case, dict[str, int]]:
    """A forest with heads that the kernels serve, and options of its plan."""
    rng = np.random.default_rng(seed)
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 4, 7, 8, 12, 16]))
    case = random_case(rng, dtype, (kv_heads * group, kv_heads, int(rng.choice([64, 128, 256]))))
    options: list[dict[str, int]] = [{}, {"num_sms": 5}, {"num_sms": 1000}]
    return case, options[seed % len(options)]


def run(case: Case, options: dict[str, int], seed: int, variant: str = "causal") -> tuple[torch.Tensor, torch.Tensor]:
    call = on_gpu(case, planned(case, SHARE_ALL if seed % 2 else SHARE_NONE, **options))
    poison(1 << 18)
    out, lse = torch.ops.prefixkit.tree_attention(*call.arguments(variant))
    again, _ = torch.ops.prefixkit.tree_attention(*call.arguments(variant))
    assert torch.equal(out, again), "two runs differ"
    return out, lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_forests_err_no_more_than_torch(implementation, dtype, num_gpu_forests):
    errors = Errors()
    for seed in range(num_gpu_forests):
        case, options = make(seed, dtype)
        out, lse = run(case, options, seed)
        exact, exact_lse = dense(case)
        errors.add(seed, case, float((out.double() - exact).abs().max()), torch_error(case, exact))
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    errors.check()


def variants(heads: int, rng: np.random.Generator) -> list[Variant]:
    return [
        sliding_window(int(rng.integers(1, 12))),
        soft_cap(3.0),
        alibi(rng.random(heads)),
        rounded_alibi(rng.random(heads).tolist(), 0.3),
        attention_sinks(),
        compose(sliding_window(5), soft_cap(2.0), alibi(rng.random(heads)), attention_sinks()),
        CAUSAL,
        sigmoid(),
        compose(sigmoid(), sliding_window(7), alibi(rng.random(heads))),
    ]


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_variant_errs_no_more_than_torchs_arithmetic(implementation, number, dtype):
    errors = Errors()
    for seed in range(100, 108):
        case, options = make(seed, dtype)
        variant = variants(case.q.shape[1], np.random.default_rng(seed))[number]
        out, lse = run(case, options, seed, register(variant))
        exact, exact_lse = dense(case, variant)
        # The largest error of few rows is chance: torch's is that of four orders of the keys, and of whole products.
        plain = [dense(case, variant, dtype, order, together=order == 0)[0] for order in range(5)]
        theirs = max(float((each.double() - exact).abs().max()) for each in plain)
        theirs = max(theirs, HALF_ULP[dtype] * float(exact.abs().max()))
        errors.add(seed, case, float((out.double() - exact).abs().max()), theirs)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    errors.check()


def test_one_tree_many_forms_same_bits(implementation):
    """Eager or in a graph, poisoned or not: the same answer, bit by bit."""
    case, options = make(7, torch.bfloat16)
    call = on_gpu(case, planned(case, SHARE_ALL, **options))
    attend = torch.ops.prefixkit.tree_attention
    expected = attend(*call.arguments())
    if implementation == "torch":
        # A plan for the kernels cuts the work otherwise, and torch runs it as cut.
        packed = on_gpu(case, gpu_plan_of(case, SHARE_ALL))
        again = attend(*packed.arguments())
        torch.testing.assert_close(again[0], expected[0], rtol=2e-2, atol=2e-2)
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(NotCapturable, match="run eagerly"):
            attend(*packed.arguments())
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = attend(*call.arguments())
        second = attend(*call.arguments())
    for _ in range(3):
        for tensor in (*first, *second):
            tensor.fill_(torch.nan)
        graph.replay()
        for out, lse in (first, second):
            assert torch.equal(out, expected[0])
            assert torch.equal(lse, expected[1])


def test_sinks_change_in_place_under_a_captured_graph(monkeypatch):
    """They are read on the device: the same graph serves a model whose weights are updated."""
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    case, options = make(7, torch.bfloat16)
    call, key = on_gpu(case, planned(case, SHARE_ALL, **options)), register(attention_sinks())
    attend = torch.ops.prefixkit.tree_attention
    before = attend(*call.arguments(key))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(*call.arguments(key))
    call.sinks.add_(2.0)
    graph.replay()
    assert all(map(torch.equal, found, attend(*call.arguments(key))))
    assert not torch.equal(found[1], before[1])


def test_a_leaf_grows_under_a_captured_graph(monkeypatch):
    """Lengths are read on the device: the same graph serves the longer leaf."""
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    snapshot, num_pages = make_snapshot(np.random.default_rng(0), [-1, 0, 0], [40, 9, 30], 16, orderly=True)
    leaves = Queries(*(np.array(column, dtype=np.int32) for column in ((1, 2), (5, 20), (6, 21))))
    snapshot.computed[1:] = (5, 20)
    case = fill(np.random.default_rng(1), snapshot, num_pages, leaves, (8, 2, 64), torch.bfloat16)
    call = on_gpu(case, planned(case, SHARE_ALL))
    torch.ops.prefixkit.tree_attention(*call.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = torch.ops.prefixkit.tree_attention(*call.arguments())
    for grown in range(3):
        later = Queries(leaves.node, leaves.begin + grown, leaves.end + grown)
        now = replace(case, queries=later)
        call.nodes[1].copy_(torch.tensor([40, 6 + grown, 21 + grown], dtype=torch.int32))
        call.q_positions.copy_(now.positions)
        graph.replay()
        exact, _ = dense(now)
        bound = 1.5 * torch_error(now, exact) + HALF_ULP[torch.bfloat16] * float(exact.abs().max())
        assert float((out.double() - exact).abs().max()) <= bound


def test_two_streams_at_once_do_not_wait_for_each_other(monkeypatch):
    """Blocks of a launch meet; two launches that share the GPU must not each hold half of it."""
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    calls = []
    for seed in (1, 4):
        case, options = make(seed, torch.bfloat16)
        calls.append(on_gpu(case, planned(case, SHARE_ALL, **options)))
    expected = [torch.ops.prefixkit.tree_attention(*call.arguments()) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    results = []
    for _ in range(50):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(torch.ops.prefixkit.tree_attention(*call.arguments()))
    torch.cuda.synchronize()
    for number, (out, lse) in enumerate(results):
        assert torch.equal(out, expected[number % 2][0])
        assert torch.equal(lse, expected[number % 2][1])


def test_head_sizes_without_a_kernel_run_in_plain_torch_and_a_plan_for_kernels_is_refused_by_name(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    case = random_case(np.random.default_rng(0), torch.bfloat16, (4, 2, 72))
    call, tree = on_gpu(case, planned(case, SHARE_ALL)), StepTree(case.snapshot, case.queries)
    with pytest.raises(UnsupportedHeads, match=r"multiples of 16 up to 256.* got 72 and 72; plan the step with"):
        torch.ops.prefixkit.tree_attention(*call.arguments())
    step, _ = backend.backend_for(GPU).planner_for(case.shape, GPU, torch.bfloat16).plan(tree, GPU)
    out, _ = torch.ops.prefixkit.tree_attention(*replace(call, plan=step.tensors).arguments())
    torch.testing.assert_close(out.double(), dense(case)[0], rtol=2e-2, atol=2e-2)


def test_a_variant_that_is_not_traced_runs_in_torch_and_says_so(monkeypatch, caplog):
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    case, options = make(2, torch.bfloat16)
    halved = variant(lambda score, b, h, q, kv: score * 0.5, name="halved", traced=False)
    out, _ = run(case, options, 2, register(halved))
    exact, _ = dense(case, halved)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    assert sum("plain torch: variant 'halved'" in record.getMessage() for record in caplog.records) == 1
    # A plan in a captured step's tensors is no step's.
    call = on_gpu(case, planned(case, SHARE_ALL, **options))
    q, k, v, positions, plan, scale, key, _ = call.arguments(register(halved))
    with pytest.raises(NotCapturable, match="nor a variant that was not traced; run eagerly"):
        torch.ops.prefixkit.tree_attention(q, k, v, positions, [tensor.clone() for tensor in plan], scale, key)


def test_a_plan_of_another_pool_is_refused_in_checked_mode(checked, monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    case, options = make(3, torch.bfloat16)
    call = on_gpu(case, planned(case, SHARE_ALL, **options))
    call.nodes[3][0] = 10_000
    with pytest.raises(BadPlan, match="of another pool"):
        torch.ops.prefixkit.tree_attention(*call.arguments())


def test_opcheck(implementation):
    case, options = make(5, torch.bfloat16)
    call = on_gpu(case, planned(case, SHARE_ALL, **options))
    torch.library.opcheck(torch.ops.prefixkit.tree_attention.default, call.arguments())


def test_bad_arguments_are_named_before_anything_is_launched(implementation):
    case, options = make(0, torch.bfloat16)
    call = on_gpu(case, planned(case, SHARE_ALL, **options))
    q, k, v, positions, plan, scale, key, _ = call.arguments()
    attend = torch.ops.prefixkit.tree_attention
    with pytest.raises(BadDtype, match=r"q must be torch.bfloat16 like the pages"):
        attend(q.half(), k, v, positions, plan, scale, key)
    with pytest.raises(BadShape, match="q_positions must have shape"):
        attend(q, k, v, positions[1:], plan, scale, key)
    if implementation == "cuda":
        with pytest.raises(BadShape, match=r"work must be the \d tensors .*, got 3"):
            attend(q, k, v, positions, plan[:3], scale, key)
        with pytest.raises(BadDtype, match=r"nodes\.pages must be torch.int32"):
            attend(q, k, v, positions, [*plan[:10], plan[10].long(), *plan[11:]], scale, key)
    else:
        with pytest.raises(BadShape, match=r"plan must be the tensors of Step\.plan, got none"):
            attend(q, k, v, positions, [], scale, key)
        with pytest.raises(NoSuchPlan, match="plan must end with a handle"):  # of a captured step
            attend(q, k, v, positions, [tensor.to(GPU) for tensor in node_tensors(case)], scale, key)
        with pytest.raises(NoSuchPlan, match="keep the Step"):
            attend(q, k, v, positions, [torch.tensor([0])], scale, key)
        with pytest.raises(BadShape, match="the plan is for"):
            attend(q[1:], k, v, positions[1:], plan, scale, key)
    with pytest.raises(ValueError, match="no variant is registered"):
        attend(q, k, v, positions, plan, scale, "unheard of")
    sinks, with_sinks = call.sinks, register(attention_sinks())
    attend(q, k, v, positions, plan, scale, with_sinks, sinks)
    with pytest.raises(BadShape, match="'attention_sinks' has sinks, but none are given"):
        attend(q, k, v, positions, plan, scale, with_sinks)
    with pytest.raises(BadShape, match="'causal' has no sinks, but some are given"):
        attend(q, k, v, positions, plan, scale, key, sinks)
    with pytest.raises(BadShape, match=r"sinks must have shape \[\d+\] \(heads of q\), contiguous"):
        attend(q, k, v, positions, plan, scale, with_sinks, sinks.repeat(2)[::2])
    with pytest.raises(BadDtype, match=r"sinks must be torch.bfloat16 like q, got torch.float32"):
        attend(q, k, v, positions, plan, scale, with_sinks, sinks.float())
    with pytest.raises(BadDevice, match="sinks is on cpu, but the first tensor is on cuda"):
        attend(q, k, v, positions, plan, scale, with_sinks, sinks.cpu())


@pytest.mark.parametrize("leaves", [1, 40], ids=["decode", "tile"])
@pytest.mark.parametrize("page", [1, 16])
def test_what_lies_before_a_window_is_not_read(monkeypatch, leaves, page):
    """A shared node of 500 tokens below a window of 70: what no query sees may hold anything, even NaN."""
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    rng = np.random.default_rng(leaves + page)
    snapshot, num_pages = make_snapshot(rng, [-1, *[0] * leaves], [500, *rng.integers(1, 9, leaves).tolist()], page)
    last = snapshot.length[1:]
    queries = Queries(np.arange(1, leaves + 1, dtype=np.int32), last - 1, last.copy())
    case = fill(rng, snapshot, num_pages, queries, (32, 8, 128), torch.bfloat16)
    call = on_gpu(case, planned(case, SHARE_ALL))
    key = register(sliding_window(70))
    expected = torch.ops.prefixkit.tree_attention(*call.arguments(key))
    hidden = np.arange(500 - 70 + 1)
    slots = torch.from_numpy(snapshot.slots(np.zeros(len(hidden), dtype=np.int32), hidden).astype(np.int64)).to(GPU)
    for pages in (call.k_pages, call.v_pages):
        pages[slots // page, slots % page] = torch.nan
    out, lse = torch.ops.prefixkit.tree_attention(*call.arguments(key))
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_a_call_keeps_no_memory_for_partial_states(monkeypatch):
    """What a pool's size is reckoned from counts it as free."""
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    rng = np.random.default_rng(0)
    leaves = 64
    snapshot, num_pages = make_snapshot(rng, [-1, *[0] * leaves], [500, *[9] * leaves], 16)
    last = snapshot.length[1:]
    queries = Queries(np.arange(1, leaves + 1, dtype=np.int32), last - 1, last.copy())
    case = fill(rng, snapshot, num_pages, queries, (32, 8, 128), torch.bfloat16)
    plan = planned(case, SHARE_ALL)
    call = on_gpu(case, plan)
    assert int(plan.counts[3]) * 32 * 129 * 4 > 2**20
    before = torch.cuda.memory_allocated()
    torch.ops.prefixkit.tree_attention(*call.arguments())
    assert torch.cuda.memory_allocated() - before < 2**19, "but for the plan as the kernel takes it, and its counters"
