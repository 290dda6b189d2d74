"""What holds a plan, and a plain refusal of what does not fit."""

from dataclasses import replace

import numpy as np
import pytest

from prefixkit.attention.bsr import decompose
from prefixkit.attention.gpu.capacity import PlanCapacity, PlanTooLarge, capacity_for
from prefixkit.attention.gpu.gpu_cost import H200, H200_COST
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.testing.forests import make_snapshot, random_parents
from prefixkit.testing.random_plans import deep_tree, random_cost, random_shape, random_tree, size_of, specified
from tests.seeds import seeds


def test_what_does_not_fit_is_named():
    small, large = PlanCapacity(3, 64, 200, 64, 128), PlanCapacity(3, 65, 100, 256, 128)
    with pytest.raises(
        PlanTooLarge, match=r"a plan needs 65 decode_items \(capacity 64\), 256 rows \(capacity 64\); make"
    ):
        small.check(large, "a plan")
    small.check(small)


@seeds(50)
def test_the_capacity_for_a_tree_holds_any_plan_of_it(seed):
    """Whatever the lengths, the costs and what is shared; so a planner on the GPU cannot run out of capacity."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, int(rng.choice([1, 5, 20, 60])))
    group, kv_heads = [(1, 8), (4, 8), (8, 1), (16, 2)][rng.integers(4)]
    sms, cost = int(rng.choice([1, 4, 132])), replace(H200, low_tile_heads=64 * (seed % 2))
    rows = None
    for _ in range(4):
        lengths = rng.integers(1, int(rng.choice([4, 100, 20000])), len(parents))
        snapshot, _ = make_snapshot(rng, parents, lengths.tolist(), 16, orderly=True)
        if rows is None:
            rows = rng.integers(0, int(rng.choice([2, 4])), len(parents)) * (rng.random(len(parents)) < 0.7)
            rows[-1] += 1
        count = np.minimum(rows, lengths)
        node = np.flatnonzero(count)
        queries = Queries(*(a.astype(np.int32) for a in (node, (lengths - count)[node], lengths[node])))
        shape = HeadShape(group * kv_heads, kv_heads, 128, 2)
        capacity = capacity_for(StepTree(snapshot, queries), shape, sms, cost)
        shared = rng.random(len(parents)) < rng.random()
        formats = [decompose(StepTree(snapshot, queries), shape, H200_COST, shared if rng.random() < 0.5 else None)]
        length = StepTree(snapshot, queries).length
        plan = make_gpu_plan(formats, length, queries.num_rows, shape, sms, cost)
        capacity.check(size_of(plan))


@seeds(60)
def test_the_capacity_for_now_holds_a_plan_and_is_no_more_than_for_any_plan(seed):
    rng = np.random.default_rng(seed)
    snapshot, queries = random_tree(rng, int(rng.choice([1, 5, 60])), int(rng.choice([4, 300, 20000])), 3, 0.6)
    shape, cost, sms = random_shape(rng), random_cost(rng), int(rng.choice([1, 5, 132]))
    capacity = capacity_for(StepTree(snapshot, queries), shape, sms, cost, now=True)
    capacity.check(size_of(specified(snapshot, queries, shape, cost, sms)))
    capacity_for(StepTree(snapshot, queries), shape, sms, cost).check(capacity)


@seeds(50)
def test_the_capacity_for_paths_holds_their_plans(seed):
    """With nodes of any lengths, and with those of now, which is no more."""
    rng = np.random.default_rng(seed)
    of_any_shape = random_tree(rng, int(rng.choice([1, 5, 60, 200])), int(rng.choice([4, 300, 20000])), 3, 0.6)
    tree = deep_tree(rng, int(rng.choice([20, 200]))) if seed % 2 else StepTree(*of_any_shape)
    shape, cost, sms = random_shape(rng), random_cost(rng), int(rng.choice([1, 5, 132]))
    plan = specified(tree.snapshot, tree.queries, shape, cost, sms, paths=True)
    any_length, now = (capacity_for(tree, shape, sms, cost, now=now, paths=True) for now in (False, True))
    now.check(size_of(plan))
    any_length.check(now)


def test_a_deep_trees_plan_needs_little_capacity():
    """Any plan of it needs a partial row for each query and ancestor; but short nodes are not shared."""
    levels = 400
    rng = np.random.default_rng(0)
    parents = [-1, *(node // 2 * 2 for node in range(2 * levels))]  # a leaf at each level of a chain
    snapshot, _ = make_snapshot(rng, parents, [2] * len(parents), 16, orderly=True)
    leaf = np.flatnonzero(snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1).astype(np.int32)
    queries, shape = Queries(leaf, leaf * 0 + 1, leaf * 0 + 2), HeadShape(32, 8, 128, 2)
    tree = StepTree(snapshot, queries)
    most, now = (capacity_for(tree, shape, 132, now=now).partials for now in (False, True))
    assert most > 20 * now
    by_paths = capacity_for(tree, shape, 132, paths=True)
    assert by_paths.partials * 20 < most and by_paths.segments * 3 < capacity_for(tree, shape, 132).segments
