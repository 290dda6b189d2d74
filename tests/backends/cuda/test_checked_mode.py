"""Checked mode names what is wrong with a plan before a kernel trusts it; on CPU tensors: it reads integers only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkit.backends.cuda.checked_mode import BadPlan, check_packed_numbers
from prefixkit.testing.forests import SHARE_ALL, gpu_plan_of, int_tensors, node_tensors, random_case


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
