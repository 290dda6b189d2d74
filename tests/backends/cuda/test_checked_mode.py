"""Checked mode names what is wrong with a plan before a kernel trusts it; on CPU tensors: it reads integers only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkit.attention.bsr import decompose
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.paths.runs import with_runs
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.backends.cuda.checked_mode import BadPlan, check_packed_numbers
from prefixkit.testing.forests import SHARE_ALL, gpu_plan_of, int_tensors, node_tensors, random_case
from prefixkit.testing.named_trees import leaf_queries, tree_of


def change_pages(work, nodes):
    nodes[3][0] = 1000


def change_length(work, nodes):
    nodes[1][0] += 1000


def change_node(work, nodes):
    work[3][0, 0] = 99


def change_end(work, nodes):
    work[3][0, 1:] = torch.tensor([0, 5000], dtype=torch.int32)


def change_rows(work, nodes):
    work[0][2] += 1


def change_queries(work, nodes):
    (work[1] if len(work[1]) else work[2])[0, 1] = 5000


def change_segments(work, nodes):
    (work[1] if len(work[1]) else work[2])[0, 4] = 5000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_pages, "of another pool"),
        (change_length, "but its pages hold"),
        (change_node, "of another tree"),
        (change_end, "of an older tree"),
        (change_rows, "and q has"),
        (change_queries, "items take queries"),
        (change_segments, "items take segments"),
    ],
)
def test_checked_mode_names_what_is_wrong_with_a_packed_plan(change, words):
    case = random_case(np.random.default_rng(3))
    nodes, work = node_tensors(case), int_tensors(*gpu_plan_of(case, SHARE_ALL).arrays())
    check_packed_numbers(len(case.q), case.k_pages.shape[:2], work, nodes)
    change(work, nodes)
    with pytest.raises(BadPlan, match=words):
        check_packed_numbers(len(case.q), case.k_pages.shape[:2], work, nodes)


@pytest.mark.parametrize("change", ["few", "descending"])
def test_checked_mode_refuses_limits_that_no_row_can_have(change):
    snapshot = tree_of("comb d33 b1 t5 s3")
    tree = StepTree(snapshot, leaf_queries(snapshot))
    rows = decompose(tree, HeadShape(4, 2, 64, 2), SHARE_ALL, paths=True)
    plan = make_gpu_plan([rows], tree.length, tree.queries.num_rows, HeadShape(4, 2, 64, 2), 2, H200)
    nodes, work = int_tensors(*with_runs(tree.arrays(), plan.runs)), int_tensors(*plan.arrays())
    where = tree.queries.num_rows, (len(snapshot.pages), snapshot.page_size)
    check_packed_numbers(*where, work, nodes)
    work[6] = work[6][:3] if change == "few" else -work[6]
    with pytest.raises(BadPlan, match="but there are 3" if change == "few" else "must ascend"):
        check_packed_numbers(*where, work, nodes)
