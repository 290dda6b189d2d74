"""Plans of captured steps for layers that see a part of the tree: what queries see is read, and little more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.attention.bsr import OPEN, MaskKind
from prefixkit.attention.gpu.capacity import PlanCapacity, PlanTooLarge
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.plan import KINDS
from prefixkit.attention.queries import StepTree, decode_tree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.visible import ALL, Visible
from prefixkit.backends.cuda.device_planner import CudaPlanner
from prefixkit.backends.cuda.plan_launch import plan_on_gpu
from prefixkit.runners.decode_tree import DecodeTree, TreeCapacity
from prefixkit.runners.kind_plans import KindPlans
from prefixkit.testing.forests import make_snapshot
from prefixkit.testing.named_trees import leaf_queries, tree_of

CPU, SHAPE = torch.device("cpu"), HeadShape(8, 2, 64, 2)
COST = replace(H200, sharing=replace(H200.sharing, tile_path=0.0))  # that small trees are shared


def graph_plans(visible: Visible, tree: StepTree, spare: int = 0) -> tuple[DecodeTree, KindPlans]:
    """The static buffers of a graph for a tree and its like, with ``spare`` pages and items."""
    planner = CudaPlanner(SHAPE, COST, 4, lambda *given: plan_on_gpu(SHAPE, COST, 4, *given), visible)
    need = TreeCapacity.of(tree)
    need = need._replace(pages=need.pages + spare)
    nodes = DecodeTree(need, tree.snapshot.page_size, CPU)
    *most, rows, partials, paths = planner.capacity_for(tree)
    capacity = PlanCapacity(*(size + spare for size in most), rows, partials + spare, paths)
    return nodes, KindPlans(planner.planner(need.nodes, capacity, CPU), planner, visible, nodes)


def tokens_read(kind: KindPlans, tree: StepTree) -> list[list[tuple[int, int]]]:
    """Of each query row: position and slot of each key that its items read and it sees."""
    counts, tile_items, decode_items, segments, _, _, limits = (array.numpy() for array in kind.planner.work)
    start, length, indptr, pages, first_slot = (array.numpy() for array in kind.nodes)
    size, found = tree.snapshot.page_size, [list[tuple[int, int]]() for _ in range(tree.queries.num_rows)]
    for item in (*tile_items[: counts[0]].tolist(), *decode_items[: counts[1]].tolist()):
        q_begin, q_end, partial, first, count = item[:5]
        for node, begin, end in segments[first : first + count // KINDS].tolist():
            within = first_slot[node] + np.arange(begin, length[node] if end == OPEN else min(end, length[node]))
            slots = pages[indptr[node] + within // size] * size + within % size
            keys = list(zip((start[node] + within - first_slot[node]).tolist(), slots.tolist(), strict=True))
            for row in range(q_begin, q_end):
                last = limits[partial + row - q_begin] if count % KINDS == MaskKind.LIMIT else OPEN
                found[row] += [key for key in keys if key[0] <= last]
    return found


def expected(tree: StepTree, row: int) -> list[tuple[int, int]]:
    """Position and slot of each key of a row's sequence."""
    snapshot, node, keys = tree.snapshot, int(tree.queries.row_node()[row]), list[tuple[int, int]]()
    while node >= 0:
        offset = np.arange(tree.length[node])
        keys += zip((snapshot.start[node] + offset).tolist(), snapshot.slots(node, offset).tolist(), strict=True)
        node = int(snapshot.parent[node])
    return sorted(keys)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "visible",
    [
        *(ALL, Visible(window=40), Visible(chunk=50), Visible(40, 64)),
        *(Visible(until=4), Visible(until=90), Visible(until=150), Visible(40, first=4), Visible(first=150)),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_each_row_reads_what_it_sees_once_and_little_more(visible: Visible, seed: int) -> None:
    """While leaves grow: between uploads a plan reads up to as many tokens more as there were steps."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(60, 130)), *rng.integers(10, 80, 8).tolist()]
    snapshot, _ = make_snapshot(rng, [-1, 0, 1, 1, 1, 0, 5, 5, 0], lengths, 2048, orderly=True)
    has_child = np.isin(np.arange(snapshot.num_nodes), snapshot.parent)
    tree = decode_tree(snapshot, np.flatnonzero(~has_child).astype(np.int32))
    nodes, kind = graph_plans(visible, tree)
    nodes.upload(tree)
    kind.upload(tree)
    for step in range(40):
        grown = tree.grown(step)
        if step and step % 16 == 0:
            kind.replan(grown)
        nodes.advance(tree.queries.num_rows)
        kind.advance()
        first = visible.begin(grown.positions)
        found = tokens_read(kind, grown)
        for row, keys in enumerate(found):
            want = expected(grown, row)
            assert len(set(keys)) == len(keys)
            seen = [key for key in want if first[row] <= key[0] < (visible.until or 1000)]
            assert all(visible.first <= key[0] < (visible.until or 1000) for key in keys)
            assert set(seen) <= set(keys) <= set(want)
        plan = kind.plan_of(grown)
        read, unshared = plan.kv_tokens(grown)
        assert unshared == int(visible.count(grown.positions).sum())
        if visible.limits:
            # A shared node is read from where the query sees it that sees most of it.
            lowest = int(visible.begin(grown.positions).min())
            assert read <= int((grown.positions + 1 - lowest).sum()) + 64 * len(found)


@pytest.mark.parametrize("visible", [ALL, Visible(window=40), Visible(chunk=30, first=4)], ids=str)
def test_deep_trees_and_others_share_buffers(visible: Visible) -> None:
    """A deep tree is planned by paths, and its runs lie behind its nodes, whose leaves alone are trimmed then."""
    deep, flat = (StepTree(tree, leaf_queries(tree)) for tree in map(tree_of, ("spine p50 d36 t1-2 s1-90", "beam d3")))
    nodes, kind = graph_plans(visible, deep, spare=3000)
    for tree in (deep, flat, deep):
        assert kind.holds(tree)
        nodes.upload(tree)
        kind.upload(tree)
        _, tile_items, decode_items, segments, *_ = (array.numpy() for array in kind.planner.work)
        by_paths = tree is deep
        counts = kind.planner.work[0].tolist()
        items = np.concatenate((tile_items[: counts[0]], decode_items[: counts[1]]))
        assert (items[:, 4] % KINDS == MaskKind.LIMIT).any() == by_paths
        assert (items[:, 5] >= tree.snapshot.num_nodes).any() == by_paths, "a run"
        for step in range(4):
            grown = tree.grown(step)
            if step == 2:
                kind.replan(grown)
            nodes.advance(tree.queries.num_rows)
            kind.advance()
            first = visible.begin(grown.positions)
            for row, keys in enumerate(tokens_read(kind, grown)):
                want = expected(grown, row)
                assert len(set(keys)) == len(keys)
                assert {key for key in want if key[0] >= first[row]} <= set(keys) <= set(want)
            plan = kind.plan_of(grown)
            assert plan.kv_tokens_read(grown.length) == plan.plan.kv_tokens_read(plan.tree.length)
            if by_paths and visible.limits:
                everything = int((grown.positions + 1).sum())
                assert sum(map(len, tokens_read(kind, grown))) < 0.8 * everything, "tiles begin where queries see"


def test_a_tree_that_fits_by_paths_alone_is_planned_so() -> None:
    """So trees that are deep now and then share buffers.  It has no runs, for these lie behind deep trees alone."""
    deep, flat = (
        StepTree(tree, leaf_queries(tree)) for tree in map(tree_of, ("comb d70 b2 t1 s3", "chain d64 b3 p9 t2"))
    )
    nodes, kind = graph_plans(ALL, deep)
    assert not flat.is_deep
    assert kind.planner.by_paths(flat)
    assert kind.holds(flat)
    nodes.upload(flat)
    kind.upload(flat)
    nodes.advance(flat.queries.num_rows)
    assert [sorted(keys) for keys in tokens_read(kind, flat)] == [expected(flat, row) for row in range(3)]
    plan = kind.plan_of(flat)
    assert plan.kv_tokens_read(flat.length) == plan.plan.kv_tokens_read(flat.length)


def test_buffers_made_for_other_trees_do_not_hold_a_deep_one() -> None:
    deep, flat = (StepTree(tree, leaf_queries(tree)) for tree in map(tree_of, ("spine p50 d36 t1-2 s1-9", "beam d6")))
    nodes, kind = graph_plans(ALL, flat)
    assert nodes.capacity.holds(TreeCapacity.of(deep))
    assert not kind.holds(deep)
    with pytest.raises(PlanTooLarge, match="1 paths"):
        kind.stage(deep)
