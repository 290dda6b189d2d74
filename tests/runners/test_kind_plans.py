"""Plans of captured steps for layers that see a part of the tree: what queries see is read, and little more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkit.attention.bsr import OPEN
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.queries import StepTree, decode_tree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.visible import ALL, Visible
from prefixkit.backends.cuda.device_planner import CudaPlanner
from prefixkit.backends.cuda.plan_launch import plan_on_gpu
from prefixkit.runners.decode_tree import DecodeCapacity, DecodeTree
from prefixkit.runners.kind_plans import KindPlans
from prefixkit.testing.forests import make_snapshot

CPU, SHAPE = torch.device("cpu"), HeadShape(8, 2, 64, 2)


def graph_plans(visible: Visible, tree: StepTree) -> tuple[DecodeTree, KindPlans]:
    """The static buffers of a graph for a tree and its like."""
    planner = CudaPlanner(SHAPE, H200, 4, lambda *given: plan_on_gpu(SHAPE, H200, 4, *given), visible)
    need = DecodeCapacity.of(tree)
    nodes = DecodeTree(need, tree.snapshot.page_size, CPU)
    return nodes, KindPlans(planner.planner(need.nodes, planner.capacity_for(tree), CPU), planner, visible, nodes)


def tokens_read(kind: KindPlans, tree: StepTree) -> list[list[tuple[int, int]]]:
    """Of each query row: position and slot of each key that its items read up to its own position."""
    counts, tile_items, decode_items, segments, _, _, _ = (array.numpy() for array in kind.planner.work)
    start, length, indptr, pages, first_slot = (array.numpy() for array in kind.nodes)
    size, found = tree.snapshot.page_size, [list[tuple[int, int]]() for _ in range(tree.queries.num_rows)]
    for item in (*tile_items[: counts[0]].tolist(), *decode_items[: counts[1]].tolist()):
        q_begin, q_end, _, first, count = item[:5]
        for node, begin, end in segments[first : first + count // 4].tolist():
            within = first_slot[node] + np.arange(begin, length[node] if end == OPEN else min(end, length[node]))
            slots = pages[indptr[node] + within // size] * size + within % size
            keys = list(zip((start[node] + within - first_slot[node]).tolist(), slots.tolist(), strict=True))
            for row in range(q_begin, q_end):
                found[row] += keys
    return found


def expected(tree: StepTree, row: int) -> list[tuple[int, int]]:
    """Position and slot of each key of a row's sequence."""
    snapshot, node, keys = tree.snapshot, int(tree.queries.row_node()[row]), list[tuple[int, int]]()
    while node >= 0:
        offset = np.arange(tree.length[node])
        keys += zip((snapshot.start[node] + offset).tolist(), snapshot.slots(node, offset).tolist(), strict=True)
        node = int(snapshot.parent[node])
    return sorted(keys)


@pytest.mark.parametrize(
    "visible",
    [
        *(ALL, Visible(window=40), Visible(chunk=50), Visible(40, 64)),
        *(Visible(until=4), Visible(until=90), Visible(until=150), Visible(40, first=4), Visible(first=150)),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
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
