"""The op ``plan_tree`` on the CPU: the specified plan in buffers of any capacity, and how it refuses arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import prefixkit.backends  # noqa: F401  (registers them)
from prefixkit.attention.gpu.capacity import FEWEST_ENTRIES, PlanCapacity, capacity_for, scratch_ints
from prefixkit.attention.gpu.gpu_cost import GpuCost
from prefixkit.attention.paths.runs import runs_of
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape
from prefixkit.testing.random_plans import (
    deep_tree,
    random_cost,
    random_shape,
    random_tree,
    random_visible,
    size_of,
    specified,
)
from prefixkit.tree.snapshot import TreeSnapshot
from tests.seeds import seeds

ops = torch.ops.prefixkit
NODES = 40


def random_case(seed: int) -> tuple[TreeSnapshot, Queries, HeadShape, GpuCost, int]:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(2, NODES)), 400, 30, 0.6)
    return *tree, random_shape(rng), random_cost(rng), int(rng.choice([1, 5, 132]))


def arguments(
    snapshot: TreeSnapshot, queries: Queries, shape: HeadShape, cost: GpuCost, num_sms: int, capacity: PlanCapacity
) -> list[Any]:
    """Of the op: a tree in arrays for ``NODES`` nodes, and a poisoned plan."""
    count, runs = snapshot.num_nodes, runs_of(snapshot)
    step = StepTree(snapshot, queries)
    run = np.full(count, -1, np.int32) if runs is None else runs.of
    arrays = snapshot.parent, snapshot.subtree_end, step.length, step.own_rows, snapshot.start, run
    tree = [torch.full((NODES,), -12345, dtype=torch.int32) for _ in arrays]
    for there, array in zip(tree, arrays, strict=True):
        there[:count] = torch.from_numpy(array)
    work = [torch.full(part, -12345, dtype=torch.int32) for part in capacity.shapes()]
    need = scratch_ints(NODES, len(work[1]), len(work[2]), len(work[4]) - 1, len(work[3]) * capacity.paths)
    sizes = torch.tensor([count, capacity.paths], dtype=torch.int32)
    scratch = torch.zeros(need, dtype=torch.int32)
    if not capacity.paths:
        tree[4:] = [sizes[:0]] * 2
    return [sizes, *tree, *work, scratch, shape.plan_heads, num_sms, cost.numbers, (0, 0, 0)]


@seeds(12)
def test_the_plan_is_the_specified_one_array_by_array(seed: int) -> None:
    snapshot, queries, shape, cost, num_sms = random_case(seed)
    plan = specified(snapshot, queries, shape, cost, num_sms)
    for capacity in (size_of(plan), capacity_for(StepTree(snapshot, queries), shape, num_sms, cost)):
        args = arguments(snapshot, queries, shape, cost, num_sms, capacity)
        ops.plan_tree(*args)
        for ours, theirs in zip(args[7:14], plan.arrays(), strict=True):
            assert np.array_equal(ours[: len(theirs)].numpy(), theirs)


@seeds(12)
def test_by_paths_too_where_sizes_say_so(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = deep_tree(rng, NODES)
    case = tree.snapshot, tree.queries, random_shape(rng), random_cost(rng), 5
    _, _, shape, cost, num_sms = case
    args, tiles = arguments(*case, capacity_for(tree, shape, num_sms, cost, paths=True)), random_visible(rng)
    ops.plan_tree(*args[:-1], tiles.numbers)
    plan = specified(*case, paths=True, tiles=tiles)
    for ours, theirs in zip(args[7:14], plan.arrays(), strict=True):
        assert np.array_equal(ours[: len(theirs)].numpy(), theirs)


@pytest.mark.parametrize("short", ["tile_items", "decode_items", "segments", "rows", "partials"])
def test_a_plan_that_does_not_fit_is_empty_and_says_so(short: str) -> None:
    fitted = 0
    for seed in range(12):
        case = random_case(seed)
        plan = specified(*case)
        need = size_of(plan)
        if getattr(need, short) <= FEWEST_ENTRIES:  # buffers have as many
            continue
        fitted += 1
        args = arguments(*case, need._replace(**{short: getattr(need, short) - 1}))
        ops.plan_tree(*args)
        assert args[7].tolist() == [0, 0, plan.counts[2], 0, 0, 0, 0, 1]
    assert fitted


def test_a_tree_of_more_nodes_than_its_arrays_hold_gives_an_empty_plan() -> None:
    case = random_case(0)
    args = arguments(*case, size_of(specified(*case)))
    args[0][0] = NODES + 1
    ops.plan_tree(*args)
    assert args[7][0] == args[7][1] == 0
    assert args[7][7] == 1


def test_costs_travel_as_numbers() -> None:
    for seed in range(20):
        cost = random_cost(np.random.default_rng(seed))
        assert GpuCost.of(list(cost.numbers)) == cost


def test_opcheck() -> None:
    case = random_case(3)
    torch.library.opcheck(ops.plan_tree.default, tuple(arguments(*case, size_of(specified(*case)))))


WRONG = {
    "dtype": (1, lambda x: x.long(), BadDtype, "tree.parent must be torch.int32"),
    "sizes": (0, lambda x: x.repeat(2), BadShape, r"sizes must have shape \[2\]"),
    "run": (6, lambda x: x.new_zeros(NODES), BadShape, r"start must have shape \[40\], contiguous"),
    "length": (3, lambda x: x[1:], BadShape, r"length must have shape \[40\], contiguous"),
    "counts": (7, lambda x: x[:7], BadShape, r"work.counts must have shape \[8\]"),
    "tile_items": (8, lambda x: x[:, :7], BadShape, r"work.tile_items must have shape \[items, 8\]"),
    "strides": (10, lambda x: x.T.contiguous().T, BadShape, "must be contiguous"),
    "scratch": (14, lambda x: x[1:], BadShape, r"scratch must have shape \[at least \d+\]"),
    "device": (9, lambda x: x.to("meta"), BadDevice, "work.decode_items is on meta"),
    "heads": (15, lambda _: (6, 4, 64, 2, 64), ValueError, "heads must be query heads, KV heads"),
    "group": (15, lambda _: (200, 1, 64, 2, 64), ValueError, "a tile must hold a GQA group of 200 heads"),
    "seen": (18, lambda _: (0, -1, 0), ValueError, "seen must be a window, a chunk and a first position"),
    "cost": (17, lambda x: x[1:], ValueError, "cost must be the 24 numbers of a GpuCost, got 23"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_named(what: str) -> None:
    position, change, error, message = WRONG[what]
    case = random_case(1)
    args = arguments(*case, size_of(specified(*case))._replace(segments=5))
    changed = [change(arg) if number == position else arg for number, arg in enumerate(args)]
    with pytest.raises(error, match=f"plan_tree: .*{message}"):
        ops.plan_tree(*changed)
    assert args[7].tolist() == [-12345] * 8, "nothing was written"
