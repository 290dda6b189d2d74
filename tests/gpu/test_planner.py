"""The planner on the GPU: the specification's plans bit by bit, in graphs too; what is too large is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.attention.gpu.capacity import OVERFLOW, PlanCapacity, PlanTooLarge, capacity_for
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.visible import ALL
from prefixkit.backends.cuda.costs import cost_cache as gpu_cost_cache
from prefixkit.backends.cuda.costs.calibrate import calibrate
from prefixkit.backends.cuda.device_planner import planner_for
from prefixkit.backends.cuda.plan_launch import GraphPlanner
from prefixkit.ops.arguments import PACKED
from prefixkit.testing.named_trees import leaf_queries, tree, tree_of
from prefixkit.testing.random_plans import (
    deep_tree,
    held_by,
    random_cost,
    random_shape,
    random_tree,
    random_visible,
    size_of,
    specified,
)


def planner_of(snapshot, queries, shape, cost, num_sms, spare=0):
    capacity = capacity_for(StepTree(snapshot, queries), shape, num_sms, cost)
    return GraphPlanner(shape, snapshot.num_nodes + spare, capacity, "cuda", cost, num_sms)


def assert_same(planner, plan, case=""):
    for name, ours, theirs in zip(
        PACKED,
        held_by(planner.work),
        plan.arrays(),
        strict=True,
    ):
        assert np.array_equal(ours, theirs), (case, name, ours[:8], theirs[:8])


def deep_planner(tree, shape, cost, num_sms, spare=0, visible=ALL):
    """One with capacity for deep trees."""
    capacity, nodes = capacity_for(tree, shape, num_sms, cost, paths=True), tree.snapshot.num_nodes + spare
    return GraphPlanner(shape, nodes, capacity, "cuda", cost, num_sms, paths=True, visible=visible)


def poisoned(planner):
    for tensor in (*planner.work, planner._scratch):
        tensor.fill_(-12345)
    return planner


SIZES = {
    "small": (300, 8, 60, 3, 0.6),
    "middling": (100, 300, 400, 2, 0.5),
    "chunks": (60, 20, 3000, 700, 0.5),
    "long": (30, 40, 200_000, 1, 0.7),
    "many": (8, 6000, 50, 1, 0.5),
}


@pytest.mark.parametrize("size", SIZES)
def test_random_trees_give_the_specified_plan_bit_by_bit(size):
    cases, nodes, longest, rows, density = SIZES[size]
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        snapshot, queries = random_tree(rng, int(rng.integers(1, nodes + 1)), longest, rows, density)
        shape, cost, sms = random_shape(rng), random_cost(rng), int(rng.choice([1, 5, 132]))
        planner = poisoned(planner_of(snapshot, queries, shape, cost, sms, spare=int(rng.integers(3))))
        planner.upload(StepTree(snapshot, queries))
        planner.plan()
        assert_same(planner, specified(snapshot, queries, shape, cost, sms), (size, seed))


@pytest.mark.parametrize("nodes", [60, 900, 6000])
def test_deep_trees_give_the_specified_plan_by_paths_bit_by_bit(nodes):
    """Combs and search trees; with adjacent nodes, queries in inner nodes, missing tokens, windows."""
    seed, deep = int(np.random.SeedSequence().generate_state(1)[0]), 0
    print("seed", seed)
    for number in range(60 if nodes < 6000 else 8):
        rng = np.random.default_rng([seed, number])
        tree = deep_tree(rng, nodes)
        if not tree.is_deep:
            continue
        deep += 1
        shape, cost, sms = random_shape(rng), random_cost(rng), int(rng.choice([1, 5, 132]))
        visible = random_visible(rng)
        planner = poisoned(deep_planner(tree, shape, cost, sms, int(rng.integers(3)), visible))
        planner.upload(tree)
        planner.plan()
        plan = specified(tree.snapshot, tree.queries, shape, cost, sms, paths=True, tiles=visible)
        assert_same(planner, plan, (seed, number))
    assert deep


DEEP = ["spine p2048 d1023 t1 s16", "spine p512 d256 t3 s1-400", "spine p512 d256 t1 s1-40", "search p700 n400 t5-60"]


@pytest.mark.parametrize("name", [*DEEP, "spine p2048 d4095 t1 s16", "search p700 n8190 t5-60"])
def test_named_deep_trees(name):
    snapshot, shape = tree_of(name), HeadShape(32, 8, 128, 2)
    tree = StepTree(snapshot, leaf_queries(snapshot))
    planner = poisoned(deep_planner(tree, shape, H200, 132))
    planner.upload(tree)
    planner.plan()
    assert_same(planner, specified(snapshot, tree.queries, shape, H200, 132, paths=True))


def test_a_captured_graph_plans_deep_trees_and_others_in_turn():
    """Whether a plan is by paths is read when the graph runs; a flat tree's plan is what it is without deep ones."""
    shape = HeadShape(32, 8, 128, 2)
    trees = [StepTree(of, leaf_queries(of)) for of in map(tree_of, (DEEP[3], "2L b64 p1024 s16", DEEP[1]))]
    needs = [capacity_for(tree, shape, 132, paths=tree.is_deep) for tree in trees]
    capacity, nodes = PlanCapacity(*map(max, *needs)), max(tree.snapshot.num_nodes for tree in trees)
    planner = GraphPlanner(shape, nodes, capacity, "cuda", H200, 132, paths=True)
    planner.upload(trees[0])
    planner.plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planner.plan()
    for each in (*trees, *trees):
        poisoned(planner).upload(each)
        graph.replay()
        assert planner.by_paths(each) == each.is_deep
        plan = specified(each.snapshot, each.queries, shape, H200, 132, paths=each.is_deep)
        assert_same(planner, plan)


@pytest.mark.parametrize(
    "name", ["2L b64 p1024 s16", "2L b1024 p4096 s128", "2L b256 p16384 s512", "3L fewshot", "beam d6"]
)
@pytest.mark.parametrize("heads", [(8, 1), (32, 8), (32, 32)])
def test_named_trees(name, heads):
    snapshot = tree_of(name)
    queries, shape = leaf_queries(snapshot), HeadShape(*heads, 128, 2)
    cost = replace(H200, low_tile_heads=64)
    planner = poisoned(planner_of(snapshot, queries, shape, cost, 132))
    planner.upload(StepTree(snapshot, queries))
    planner.plan()
    assert_same(planner, specified(snapshot, queries, shape, cost, 132))


def test_a_long_prompt():
    snapshot = tree([-1], [65536])
    snapshot.computed[:] = 0
    queries = Queries(*(np.array([x], dtype=np.int32) for x in (0, 0, 65536)))
    shape = HeadShape(32, 8, 128, 2)
    planner = planner_of(snapshot, queries, shape, H200, 132)
    planner.upload(StepTree(snapshot, queries))
    planner.plan()
    assert_same(planner, specified(snapshot, queries, shape, H200, 132))


@pytest.mark.parametrize("heads", [(8, 1), (2, 1), (16, 2)])
def test_a_lone_long_sequence_in_hundreds_of_pieces(heads):
    snapshot, shape = tree_of("2L b1 p1048576 s128"), HeadShape(*heads, 128, 2)
    queries = leaf_queries(snapshot)
    plan = specified(snapshot, queries, shape, H200, 132)
    assert len(plan.decode_items) * shape.kv_heads >= 500
    planner = planner_of(snapshot, queries, shape, H200, 132)
    planner.upload(StepTree(snapshot, queries))
    planner.plan()
    assert_same(planner, plan)


def test_a_captured_graph_plans_anew_as_nodes_grow_and_trees_change():
    shape = HeadShape(8, 1, 128, 2)
    first, other = tree_of("2L b256 p4096 s128"), tree_of("2L b64 p1024 s512")
    planner = planner_of(first, leaf_queries(first), shape, H200, 132)
    planner.upload(StepTree(first, leaf_queries(first)))
    planner.plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planner.plan()
    addresses = [tensor.data_ptr() for tensor in planner.work]
    for step in range(3):
        planner.length[1:257] += 100  # leaves grow, known to the device alone
        grown = tree([-1] + [0] * 256, [4096] + [128 + 100 * (step + 1)] * 256)
        for tensor in planner.work:
            tensor.fill_(-1)
        graph.replay()
        assert_same(planner, specified(grown, leaf_queries(grown), shape, H200, 132))
    planner.upload(StepTree(other, leaf_queries(other)))
    graph.replay()
    assert_same(planner, specified(other, leaf_queries(other), shape, H200, 132))
    assert addresses == [tensor.data_ptr() for tensor in planner.work]


def test_a_tree_that_may_not_fit_is_refused_before_anything_is_launched():
    small, large = tree_of("2L b64 p1024 s16"), tree_of("2L b256 p1024 s16")
    shape = HeadShape(8, 1, 128, 2)
    planner = planner_of(small, leaf_queries(small), shape, H200, 132)
    with pytest.raises(PlanTooLarge, match="257 nodes, but the planner has capacity for 65"):
        planner.upload(StepTree(large, leaf_queries(large)))
    planner = GraphPlanner(shape, 300, planner.capacity, "cuda", H200, 132)
    with pytest.raises(PlanTooLarge, match=r"decode_items \(capacity .*256 rows \(capacity 64\)"):
        planner.upload(StepTree(large, leaf_queries(large)))


@pytest.mark.parametrize("short", ["tile_items", "decode_items", "segments", "rows", "partials"])
def test_a_plan_that_does_not_fit_after_all_is_empty_and_says_so(short):
    """A tree that kernels wrote was never checked; nothing is written outside."""
    snapshot, shape = tree_of("2L b256 p16384 s128"), HeadShape(8, 1, 128, 2)
    queries = leaf_queries(snapshot)
    planner = planner_of(snapshot, queries, shape, H200, 132)
    need = size_of(specified(snapshot, queries, shape, H200, 132))
    tight = GraphPlanner(shape, 300, need._replace(**{short: getattr(need, short) - 1}), "cuda", H200, 132)
    planner.upload(StepTree(snapshot, queries))
    for ours, theirs in zip(tight._tree.tensors, planner._tree.tensors, strict=True):
        ours[: len(theirs)].copy_(theirs)
    tight.plan()
    assert tight.work[0].tolist() == [0, 0, 256, 0, 0, 0, 0, 1]
    exact = GraphPlanner(shape, 300, need, "cuda", H200, 132)
    for ours, theirs in zip(exact._tree.tensors, planner._tree.tensors, strict=True):
        ours[: len(theirs)].copy_(theirs)
    exact.plan()
    assert exact.work[0][OVERFLOW] == 0
    assert held_by(exact.work)[0][0] == need.tile_items


def test_calibration_fits_what_it_measured():
    cost = calibrate("cuda")
    assert cost.decode.tokens_per_us > 0
    assert 0.2 < cost.tile.tokens_per_us / cost.decode.tokens_per_us < 20
    assert 0 < cost.sharing.kv_byte < 1e-4
    snapshot, shape = tree_of("2L b64 p4096 s128"), HeadShape(32, 8, 128, 2)
    assert len(specified(snapshot, leaf_queries(snapshot), shape, cost, 132).tile_items) > 0, (
        "a long prefix of many is shared"
    )


def test_the_planner_for_a_gpu_uses_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path))
    device, shape = torch.device("cuda", 0), HeadShape(8, 2, 128, 2)
    estimated = planner_for(shape, device, torch.bfloat16).gpu
    place, cost, now = gpu_cost_cache.measured_cost(device)
    assert now
    assert place.parent == tmp_path / "costs"
    assert not gpu_cost_cache.measured_cost(device)[2], "once per machine"
    used = planner_for(shape, device, torch.bfloat16).gpu
    assert used != estimated
    assert replace(used, low_tile_heads=cost.low_tile_heads) == cost, "but for what only the kernel decides"
