"""Steps: what a forward pass is told."""

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import build_step
from tests.attention.planners import PLANNERS, cpu_planner, grown_tree, in_torch, runs


@pytest.mark.parametrize("make", PLANNERS.values(), ids=PLANNERS)
def test_a_decode_step_names_tokens_positions_and_slots(make):
    tree, _ = grown_tree()
    snapshot = tree.snapshot()
    step = build_step(StepTree(snapshot, runs((1, 0, 1), (2, 0, 1))), np.array([20, 30]), np.array([0, 1]), make())
    assert step.tokens.tolist() == [20, 30]
    assert step.positions.tolist() == [5, 5]
    assert step.slots.tolist() == [5, 8]  # the first fork goes on in the last page, the second starts page 2
    assert step.logit_rows.tolist() == [0, 1]
    assert step.num_rows == 2
    assert step.length.tolist() == [5, 1, 1]
    assert step.kv_tokens[1] == 12
    assert step.plan is step.plans[0].tensors
    kinds = [(tensor.dtype, tensor.ndim) for tensor in step.plan]
    of_kernels = [(torch.int32, ndim) for ndim in (1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1)]
    assert kinds == (of_kernels if len(step.plan) > 1 else [(torch.int64, 1)]), "of one backend alone"


@pytest.mark.parametrize("make", PLANNERS.values(), ids=PLANNERS)
def test_a_token_that_has_kv_runs_again_without_writing_it(make):
    tree, _ = grown_tree()
    queries = runs((0, 3, 5), (1, 0, 1))
    step = build_step(StepTree(tree.snapshot(), queries), np.array([13, 14, 20]), np.array([0, 1, 2]), make())
    assert step.slots.tolist() == [-1, -1, 5]
    assert step.positions.tolist() == [3, 4, 5]
    assert step.length.tolist() == [5, 1, 0]


def test_queries_that_cannot_be_are_refused_before_anything_else():
    tree, _ = grown_tree()
    with pytest.raises(ValueError, match=r"must name nodes 0\.\.2"):
        build_step(StepTree(tree.snapshot(), runs((7, 0, 1))), np.array([20]), np.array([0]), cpu_planner())


@pytest.mark.parametrize("make", PLANNERS.values(), ids=PLANNERS)
def test_a_steps_tensors_do_not_follow_the_tree(make):
    tree, forks = grown_tree()
    step = build_step(StepTree(tree.snapshot(), runs((1, 0, 1))), np.array([20]), np.array([0]), make())
    before, length = [tensor.clone() for tensor in step.plan], step.length.copy()
    tree.mark_computed(tree.nodes()[1:], [1, 1])
    tree.extend_each(forks, [21, 31])
    tree.snapshot()
    assert all(torch.equal(a, b) for a, b in zip(before, step.plan, strict=True))
    assert np.array_equal(length, step.length)
    assert np.array_equal(in_torch(step).tree.length, length)


def test_tokens_that_do_not_match_the_queries_are_refused():
    tree, _ = grown_tree()
    with pytest.raises(ValueError, match="1 rows, but 2 tokens"):
        build_step(StepTree(tree.snapshot(), runs((1, 0, 1))), np.array([20, 30]), np.array([0]), cpu_planner())
