"""Planners: what is remembered while the tree stands, and how long plans live; for each backend alike."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.planner import Planner, StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import Step, build_step
from prefixkit.backends.torch import run_program
from prefixkit.backends.torch.host_planner import NoSuchPlan, find_plan
from prefixkit.ops import library as ops  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.ops.arguments import BadShape
from prefixkit.tree.radix import PrefixTree
from tests.attention.planners import PLANNERS, cpu_planner, grown_tree, in_torch, runs

CPU = torch.device("cpu")


@pytest.fixture(params=PLANNERS)
def planner(request: pytest.FixtureRequest) -> Planner:
    return PLANNERS[request.param]()


def decode(planner: Planner, tree: PrefixTree, *leaves: int) -> Step:
    """The step of the last token of each leaf."""
    snapshot = tree.snapshot()
    last = [(leaf, int(snapshot.length[leaf]) - 1, int(snapshot.length[leaf])) for leaf in leaves]
    return build_step(StepTree(snapshot, runs(*last)), np.zeros(len(leaves)), np.arange(len(leaves)), planner)


def attention(step: Step, rows: int | None = None, pages: int = 64) -> tuple[Tensor, Tensor]:
    """Attention of this step in plain torch, on as many rows as it has or others."""
    rows = step.num_rows if rows is None else rows
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=numbers) for shape in ((rows, 4, 8), (pages, 4, 2, 8), (pages, 4, 2, 8)))
    positions = torch.zeros(rows, dtype=torch.int64)
    out, lse = run_program.tree_attention(q, k, v, positions, in_torch(step), 0.3, "causal")
    return out, lse


def grow(tree: PrefixTree, forks: list[object]) -> None:
    nodes = tree.nodes()[1:]
    tree.mark_computed(nodes, [node.length for node in nodes])
    tree.extend_each(forks, [21, 31])


# What is remembered


def test_a_plan_is_kept_while_leaves_grow_and_remade_when_the_tree_changes(planner: Planner) -> None:
    tree, forks = grown_tree()
    first = decode(planner, tree, 1, 2)
    grow(tree, forks)
    second = decode(planner, tree, 1, 2)
    assert planner.plans_made == 1
    assert second.plans[0].plan is first.plans[0].plan
    assert [step.length.tolist() for step in (first, second)] == [[5, 1, 1], [5, 2, 2]]
    assert in_torch(second).tree.length.tolist() == [5, 2, 2]
    assert in_torch(second).tree.positions.tolist() == [6, 6]
    assert second.kv_tokens[0] == first.kv_tokens[0] + 2
    tree.release(forks[0])
    decode(planner, tree, 1)
    assert planner.plans_made == 2


def test_a_plan_that_was_kept_computes_what_a_new_one_does(planner: Planner) -> None:
    tree, forks = grown_tree()
    before = attention(decode(planner, tree, 1, 2))
    grow(tree, forks)
    kept, made = decode(planner, tree, 1, 2), decode(cpu_planner(), tree, 1, 2)
    for ours, theirs in zip(attention(kept), attention(made), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.equal(attention(kept)[0], before[0])


@pytest.mark.parametrize("change", ["other leaves", "more rows of a leaf"])
def test_other_queries_of_the_same_tree_are_planned_anew(planner: Planner, change: str) -> None:
    tree, forks = grown_tree()
    decode(planner, tree, 1, 2)
    grow(tree, forks)
    if change == "other leaves":
        decode(planner, tree, 2)
    else:
        both = runs((1, 0, 2), (2, 1, 2))
        build_step(StepTree(tree.snapshot(), both), np.zeros(3), np.arange(3), planner)
    assert planner.plans_made == 2


def test_trees_of_equal_version_have_plans_of_their_own(planner: Planner) -> None:
    """Two leaves below nothing, and a leaf below a prompt: equal queries of nodes that mean other things."""
    apart, below = PrefixTree(64, page_size=4), PrefixTree(64, page_size=4)
    apart.insert([10, 11, 12]), apart.insert([20])
    below.extend_each(below.fork(below.insert([10, 11, 12]), 1), [13])
    one, other = apart.snapshot(), below.snapshot()
    assert one.version == other.version and one.length.tolist() == other.length.tolist()
    trees = [StepTree(snapshot, runs((0, 0, 3), (1, 0, 1))) for snapshot in (one, other)]
    first, second = (build_step(tree, np.array([10, 11, 12, 20]), np.array([3]), planner) for tree in trees)
    assert planner.plans_made == 2
    for tree, step in zip(trees, (first, second), strict=True):
        alone = planner.specify(tree)
        assert all(np.array_equal(a, b) for a, b in zip(step.plans[0].plan.arrays(), alone.arrays(), strict=True))
    assert first.kv_tokens[0] == 4, "no leaf reads the other"
    assert second.kv_tokens[0] >= 3 + 1


def test_a_tree_made_where_another_was_is_not_taken_for_it(planner: Planner) -> None:
    made = 0
    for _ in range(20):
        tree = PrefixTree(64, page_size=4)
        tree.insert([10, 11, 12])
        build_step(StepTree(tree.snapshot(), runs((0, 0, 3))), np.array([10, 11, 12]), np.array([2]), planner)
        made += 1
        del tree
    assert planner.plans_made == made


def test_steps_of_one_planner_stay_good_side_by_side(planner: Planner) -> None:
    tree, forks = grown_tree()
    first = decode(planner, tree, 1, 2)
    before, results = [tensor.clone() for tensor in first.plan], attention(first)
    grow(tree, forks)
    second = decode(planner, tree, 1, 2)
    tree.release(forks[0])
    third = decode(planner, tree, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, first.plan, strict=True))
    assert all(map(torch.equal, results, attention(first)))
    assert len({id(in_torch(step)) for step in (first, second, third)}) == 3


def test_queries_that_cannot_be_leave_the_last_plan_as_it_was(planner: Planner) -> None:
    tree, _ = grown_tree()
    first = decode(planner, tree, 1, 2)
    with pytest.raises(ValueError, match=r"must name nodes 0\.\.2"):
        build_step(StepTree(tree.snapshot(), runs((7, 0, 1))), np.array([20]), np.array([0]), planner)
    assert decode(planner, tree, 1, 2).plans[0].plan is first.plans[0].plan
    assert planner.plans_made == 1


def test_arrays_travel_beside_the_plan_in_their_dtypes(planner: Planner) -> None:
    tree, _ = grown_tree()
    for _ in range(2):  # made, then kept
        beside = [np.arange(3, dtype=np.int64), np.arange(4, dtype=np.int32).reshape(2, 2), np.zeros(0, dtype=np.int64)]
        _, tensors = planner.plan(StepTree(tree.snapshot(), runs((1, 0, 1))), CPU, lambda arrays=beside: arrays)
        for tensor, array in zip(tensors, beside, strict=True):
            assert torch.equal(tensor, torch.from_numpy(array)) and tensor.dtype == torch.from_numpy(array).dtype


# How long plans live


def bound(step: Step) -> weakref.ref[object]:
    return weakref.ref(in_torch(step))


def test_a_renewed_plan_does_not_keep_earlier_ones_alive(planner: Planner) -> None:
    """Step after step over a tree that stands: one plan is alive, however many were renewed."""
    tree, forks = grown_tree()
    bounds, plans = [], []
    for _ in range(6):
        step = decode(planner, tree, 1, 2)
        bounds.append(bound(step)), plans.append(weakref.ref(step.plans[0]))
        grow(tree, forks)
    gc.collect()
    assert planner.plans_made == 1
    for held in (bounds, plans):
        assert [one() is not None for one in held] == [False] * 5 + [True], "the step's and the planner's"
    del step, planner
    gc.collect()


def test_the_planner_lets_go_of_a_plan_when_it_makes_the_next(planner: Planner) -> None:
    tree, forks = grown_tree()
    first = decode(planner, tree, 1, 2)
    held, alive = bound(first), weakref.ref(first.plans[0])
    del first
    tree.release(forks[0])
    decode(planner, tree, 1)
    gc.collect()
    assert held() is None and alive() is None


@pytest.mark.parametrize("make", PLANNERS.values(), ids=PLANNERS)
def test_a_plan_lives_as_long_as_its_step_even_without_its_planner(make: Callable[[], Planner]) -> None:
    tree, _ = grown_tree()
    step = decode(make(), tree, 1, 2)
    gc.collect()
    assert torch.isfinite(attention(step)[0]).all()


def test_a_handle_of_a_step_that_is_gone_is_refused() -> None:
    tree, _ = grown_tree()
    step = decode(cpu_planner(), tree, 1, 2)
    handle = step.plan[-1]
    attention(step)
    del step
    gc.collect()
    with pytest.raises(NoSuchPlan, match=rf"plan {int(handle)} is gone; keep the Step until the model has run it"):
        find_plan(handle)
    q, pages = torch.zeros(2, 4, 8), torch.zeros(8, 4, 2, 8)
    with pytest.raises(NoSuchPlan, match="keep the Step"):
        torch.ops.prefixkit.tree_attention(q, pages, pages, torch.zeros(2).long(), [handle], 1.0, "causal")


def test_handles_are_never_used_again() -> None:
    tree, forks = grown_tree()
    planner, seen = cpu_planner(), set()
    for _ in range(20):
        seen.add(int(decode(planner, tree, 1, 2).plan[-1]))
        grow(tree, forks)
    assert len(seen) == 20


@pytest.mark.parametrize("rows", [1, 3])
def test_a_plan_for_another_number_of_rows_is_refused(planner: Planner, rows: int) -> None:
    tree, _ = grown_tree()
    step = decode(planner, tree, 1, 2)
    with pytest.raises(BadShape, match=f"the plan is for 2 queries, but q has {rows} rows"):
        attention(step, rows)


def test_the_plan_on_the_host_is_made_when_it_is_asked_for_and_once() -> None:
    tree, _ = grown_tree()
    snapshot, queries = tree.snapshot(), runs((1, 0, 1), (2, 0, 1))
    calls = []

    def specify() -> object:
        calls.append(None)
        return cpu_planner().specify(StepTree(snapshot, queries))

    plan = StepPlan([], StepTree(snapshot, queries), specify)  # type: ignore[arg-type]
    assert not calls
    assert plan.plan is plan.plan
    assert plan.kv_tokens_read(snapshot.length) == plan.plan.kv_tokens_read(snapshot.length)
    assert len(calls) == 1
