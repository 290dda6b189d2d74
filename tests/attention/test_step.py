"""Steps: what a forward pass is told, and plans remembered while the tree stands."""

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import Planner, build_step
from prefixkit.tree.radix import PrefixTree

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=8, itemsize=4)


def runs(*triples):
    return Queries(*(np.array(column, dtype=np.int32) for column in zip(*triples, strict=True)))


def grown_tree():
    tree = PrefixTree(64, page_size=4)
    prompt = tree.insert([10, 11, 12, 13, 14])
    forks = tree.fork(prompt, 2)
    tree.extend_each(forks, [20, 30])
    tree.mark_ready([prompt.node], [5])
    return tree, forks


def test_a_decode_step_names_tokens_positions_and_slots():
    tree, _ = grown_tree()
    snapshot = tree.snapshot()
    step = build_step(
        StepTree(snapshot, runs((1, 0, 1), (2, 0, 1))), np.array([20, 30]), np.array([0, 1]), Planner(SHAPE)
    )
    assert step.tokens.tolist() == [20, 30]
    assert step.positions.tolist() == [5, 5]
    assert step.slots.tolist() == [8, 12]  # fresh pages 2 and 3: a fork never writes into its parent's page
    assert step.nodes[1].tolist() == [5, 1, 1]
    assert step.kv_tokens_unshared == 12
    assert all(tensor.dtype == torch.int32 for tensor in (*step.work, *step.nodes))


def test_a_plan_is_kept_while_leaves_grow_and_remade_when_the_tree_changes():
    tree, forks = grown_tree()
    planner = Planner(SHAPE)
    queries = runs((1, 0, 1), (2, 0, 1))
    first = build_step(StepTree(tree.snapshot(), queries), np.array([20, 30]), np.array([0, 1]), planner)
    nodes = tree.nodes()
    tree.mark_ready(nodes[1:], [1, 1])
    tree.extend_each(forks, [21, 31])
    second = build_step(
        StepTree(tree.snapshot(), runs((1, 1, 2), (2, 1, 2))), np.array([21, 31]), np.array([0, 1]), planner
    )
    assert second.plan is first.plan
    assert second.nodes[1].tolist() == [5, 2, 2]
    tree.release(forks[0])
    build_step(StepTree(tree.snapshot(), runs((1, 1, 2))), np.array([31]), np.array([0]), planner)
    assert planner.plans_made == 2


def test_trees_of_equal_version_have_plans_of_their_own():
    """Two leaves below nothing, and a leaf below a prompt: equal queries of nodes that mean other things."""
    apart, below = PrefixTree(64, page_size=4), PrefixTree(64, page_size=4)
    apart.insert([10, 11, 12]), apart.insert([20])
    below.extend_each(below.fork(below.insert([10, 11, 12]), 1), [13])
    one, other = apart.snapshot(), below.snapshot()
    assert one.version == other.version and one.length.tolist() == other.length.tolist()
    arguments = runs((0, 0, 3), (1, 0, 1)), np.array([10, 11, 12, 20]), np.array([3])
    planner = Planner(SHAPE)
    first, second = (build_step(snapshot, *arguments, planner) for snapshot in (one, other))
    assert planner.plans_made == 2
    for snapshot, step in ((one, first), (other, second)):
        alone = build_step(snapshot, *arguments, Planner(SHAPE))
        assert all(torch.equal(a, b) for a, b in zip(step.work, alone.work, strict=True))
    assert first.kv_tokens_read == 4, "no leaf reads the other"
    assert second.kv_tokens_read >= 3 + 1


def test_a_tree_made_where_another_was_is_not_taken_for_it():
    planner, made = Planner(SHAPE), 0
    for _ in range(20):
        tree = PrefixTree(64, page_size=4)
        tree.insert([10, 11, 12])
        build_step(StepTree(tree.snapshot(), runs((0, 0, 3))), np.array([10, 11, 12]), np.array([2]), planner)
        made += 1
        del tree
    assert planner.plans_made == made


def test_steps_of_one_planner_stay_good_side_by_side():
    tree, forks = grown_tree()
    planner = Planner(SHAPE, num_sms=1)
    first = build_step(
        StepTree(tree.snapshot(), runs((1, 0, 1), (2, 0, 1))), np.array([20, 30]), np.array([0, 1]), planner
    )
    before = [tensor.clone() for tensor in first.work]
    tree.release(forks[0])
    build_step(StepTree(tree.snapshot(), runs((1, 0, 1))), np.array([30]), np.array([0]), planner)
    assert all(torch.equal(a, b) for a, b in zip(before, first.work, strict=True))


def test_queries_that_cannot_be_are_refused_before_anything_else():
    tree, _ = grown_tree()
    with pytest.raises(ValueError, match=r"must name nodes 0\.\.2"):
        build_step(StepTree(tree.snapshot(), runs((7, 0, 1))), np.array([20]), np.array([0]), Planner(SHAPE))


def test_a_steps_tensors_do_not_follow_the_tree():
    tree, forks = grown_tree()
    step = build_step(StepTree(tree.snapshot(), runs((1, 0, 1))), np.array([20]), np.array([0]), Planner(SHAPE))
    before = [tensor.clone() for tensor in step.nodes]
    tree.mark_ready(tree.nodes()[1:], [1, 1])
    tree.extend_each(forks, [21, 31])
    tree.snapshot()
    assert all(torch.equal(a, b) for a, b in zip(before, step.nodes, strict=True))


def test_tokens_that_do_not_match_the_queries_are_refused():
    tree, _ = grown_tree()
    with pytest.raises(ValueError, match="1 rows, but 2 tokens"):
        build_step(StepTree(tree.snapshot(), runs((1, 0, 1))), np.array([20, 30]), np.array([0]), Planner(SHAPE))
