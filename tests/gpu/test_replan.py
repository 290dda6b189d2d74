"""Steps whose plans the GPU makes: equal to numpy's in effect, while trees grow and change, without a wait."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.attention.bsr import MaskKind
from prefixkit.attention.plan import KINDS
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import build_step
from prefixkit.attention.visible import ALL
from prefixkit.backends.cuda.device_planner import CudaPlanner, planner_for
from prefixkit.checking import checked
from prefixkit.runners.decode_tree import DecodeTree, TreeCapacity
from prefixkit.runners.kind_plans import KindPlans
from prefixkit.testing.named_trees import leaf_queries, tree_of
from prefixkit.tree.radix import PrefixTree
from tests.gpu.cases import poison

GPU = torch.device("cuda", 0)


@pytest.fixture(params=[(32, 8), (8, 1)], ids=["32/8", "8/1"])
def planners(request, monkeypatch):
    """One that has the GPU plan, and one like it that plans on the host."""
    monkeypatch.setenv("PREFIXKIT_BACKEND", "cuda")
    there = planner_for(HeadShape(*request.param, 128, 2), GPU, torch.bfloat16)
    if there.launch is None:
        pytest.skip("this GPU's kernel has tiles that its planner does not know")
    return there, CudaPlanner(there.shape, there.gpu, there.num_sms)


def make(planner, snapshot, queries):
    tokens = np.zeros(queries.num_rows, dtype=np.int64)
    return build_step(StepTree(snapshot, queries), tokens, tokens[:1], planner, GPU)


def made_on_gpu(step):
    """What such a plan reads is counted without it; for one that numpy made, the plan on the host is at hand."""
    return step.plans[0].count_reads is not None


def pools(shape, num_pages, page_size=16):
    size = (num_pages, shape.kv_heads, page_size, shape.head_dim)
    return [torch.randn(size, device=GPU, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv"]


def attend(shape, step, pages, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(step.num_rows, shape.heads, shape.head_dim, device=GPU, dtype=torch.bfloat16)
    return torch.ops.prefixkit.tree_attention(q, *pages, step.positions, step.plan, 0.1, "causal")


def pending(snapshot):
    node = np.flatnonzero(snapshot.computed < snapshot.length).astype(np.int32)
    return Queries(node, snapshot.computed[node], snapshot.length[node])


@pytest.mark.parametrize("seed", range(3))
def test_attention_is_the_same_bit_by_bit_while_a_tree_grows_and_changes(planners, seed):
    there, host = planners
    rng = np.random.default_rng(seed)
    tree = PrefixTree(6000, 16)
    pages = pools(there.shape, 6000)
    prompt = tree.insert(np.arange(int(rng.integers(20, 5000))))
    live = tree.fork(prompt, int(rng.integers(2, 60)))
    for turn in range(40):
        if turn % 4 == 3:  # the others grow only
            for _ in range(3):
                live += tree.fork(live[rng.integers(len(live))], int(rng.integers(1, 4)))
                tree.release(live.pop(int(rng.integers(len(live)))))
        if turn:
            tree.extend_each(live, rng.integers(0, 1000, len(live)).tolist())
        snapshot, nodes = tree.snapshot(), tree.nodes()
        queries = pending(snapshot)
        ours, theirs = make(there, snapshot, queries), make(host, snapshot, queries)
        assert made_on_gpu(ours) and not made_on_gpu(theirs)
        for a, b in zip(attend(there.shape, ours, pages), attend(there.shape, theirs, pages), strict=True):
            assert torch.equal(a, b)
        assert ours.kv_tokens[0] == theirs.kv_tokens[0]
        tree.mark_computed([nodes[node] for node in queries.node.tolist()], queries.end.tolist())
    assert there.plans_made == host.plans_made < 40


@pytest.mark.parametrize("name", ["spine p300 d100 t1 s5", "spine p600 d60 t1-9 s1-40", "search p300 n300 t1-30"])
def test_attention_over_a_deep_tree_is_the_same_bit_by_bit_in_steps_and_in_graphs_buffers(planners, name):
    """Planned by numpy, by the GPU for one step, and in the static buffers of a graph, behind whose nodes runs lie."""
    there, host = planners
    snapshot = tree_of(name)
    tree, pages = StepTree(snapshot, leaf_queries(snapshot)), pools(there.shape, len(snapshot.pages))
    ours, theirs = make(there, snapshot, tree.queries), make(host, snapshot, tree.queries)
    assert tree.is_deep
    assert made_on_gpu(ours) and not made_on_gpu(theirs)
    assert (theirs.plans[0].plan.items[:, 4] % KINDS == MaskKind.LIMIT).any()
    buffers = DecodeTree(TreeCapacity.of(tree), snapshot.page_size, GPU)
    nodes = buffers.capacity.nodes
    kind = KindPlans(there.planner(nodes, there.capacity_for(tree), GPU), there, ALL, buffers)
    buffers.upload(tree)
    kind.upload(tree)
    buffers.advance(tree.queries.num_rows)
    captured = replace(ours, plans=(kind.plan_of(tree),), positions=buffers.positions)
    expected = attend(there.shape, theirs, pages)
    for step in (ours, captured):
        poison()
        for a, b in zip(attend(there.shape, step, pages), expected, strict=True):
            assert torch.equal(a, b)
        assert step.kv_tokens[0] == theirs.kv_tokens[0]


def test_steps_built_ahead_of_each_other_stay_good(planners):
    there, _ = planners
    trees = [tree_of(name) for name in ("2L b64 p1024 s16", "2L b256 p4096 s128", "beam d6")]
    pages = pools(there.shape, max(int(tree.pages.max()) + 1 for tree in trees))
    steps, expected = [], []
    for version, tree in enumerate(trees):
        steps.append(make(there, replace(tree, version=version), leaf_queries(tree)))
        expected.append(attend(there.shape, steps[-1], pages)[0])
    for step, out in reversed(list(zip(steps, expected, strict=True))):
        assert torch.equal(attend(there.shape, step, pages)[0], out)


@pytest.mark.skipif(checked(), reason="checked mode refuses plans of fewer rows")
@pytest.mark.parametrize("name", ["2L b64 p1024 s16", "2L b256 p4096 s128", "beam d6"])
def test_rows_behind_the_plan_come_out_as_zeros(planners, name):
    """As those of a graph's bucket that a batch does not fill."""
    there, _ = planners
    snapshot, more = tree_of(name), 21
    step, pages = make(there, snapshot, leaf_queries(snapshot)), pools(there.shape, int(snapshot.pages.max()) + 1)
    expected, expected_lse = attend(there.shape, step, pages)
    rows, padded = step.num_rows, torch.nn.functional.pad
    torch.manual_seed(0)  # as attend does
    q = torch.randn(rows, there.shape.heads, there.shape.head_dim, device=GPU, dtype=torch.bfloat16)
    plan = [*step.plan[:4], padded(step.plan[4], (0, more)), *step.plan[5:]]  # merge_indptr, longer
    poison()
    out, lse = torch.ops.prefixkit.tree_attention(
        padded(q, (0, 0, 0, 0, 0, more)), *pages, padded(step.positions, (0, more)), plan, 0.1, "causal"
    )
    assert torch.equal(out[:rows], expected) and torch.equal(lse[:rows], expected_lse)
    assert not out[rows:].any() and bool((lse[rows:] == -torch.inf).all())


def test_replans_neither_wait_nor_take_more_memory(planners):
    there, _ = planners
    trees = [tree_of(name) for name in ("2L b64 p1024 s16", "2L b1024 p4096 s128", "beam d6", "3L fewshot")]
    pages = pools(there.shape, max(int(tree.pages.max()) + 1 for tree in trees))

    def turn(version):
        for tree in trees:
            version += 1
            attend(there.shape, make(there, replace(tree, version=version), leaf_queries(tree)), pages)
        return version

    version = turn(turn(0))
    held = torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            version = turn(version)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_reserved()) == held
    assert there.plans_made == version


def test_what_would_take_too_much_room_is_planned_by_numpy_and_said(planners, caplog):
    there, _ = planners
    tree = tree_of("2L b131072 p4096 s16")
    with caplog.at_level(logging.DEBUG, "prefixkit"):
        step = make(there, tree, leaf_queries(tree))
    assert not made_on_gpu(step)
    assert "numpy plans: any plan of these queries needs" in caplog.text
