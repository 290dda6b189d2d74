"""Attention under masks that show later tokens, judged by the float64 oracle on random forests."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import StepTree
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.variants import compose, register, soft_cap, variant
from prefixkit.backends.torch.host_planner import bind
from prefixkit.testing.forests import SHARE_ALL, SHARE_NONE, plan_of, random_case

MASKS = {
    "none": lambda b, h, q_idx, kv_idx: kv_idx >= 0,
    "prefix": lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < 9),
    "pairs": lambda b, h, q_idx, kv_idx: q_idx // 2 == kv_idx // 2,
    "by head": lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | ((h % 2 == 0) & (kv_idx <= q_idx + 3)),
}


@pytest.fixture
def rng():
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("bounded", [False, True])
def test_queries_see_what_the_mask_shows_as_far_as_they_may(name, bounded, rng):
    """To the end of their node's KV; or to bounds of their own, as those of spans."""
    ahead = variant(mask_mod=MASKS[name], name=name)
    near = variant(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < 6) & (kv_idx - q_idx < 4))
    for of in (ahead, compose(ahead, soft_cap(2.0)), compose(ahead, near)):
        key = register(of)
        for cost in (SHARE_ALL, SHARE_NONE):
            case = random_case(rng)
            tree = StepTree(case.snapshot, case.queries)
            node, positions = case.row_node, case.positions.numpy()
            last = case.snapshot.start[node] + tree.length[node] - 1
            later = rng.integers(0, last - positions + 1).astype(np.int32) if bounded else last - positions
            step = bind(plan_of(case, cost), StepTree(case.snapshot, case.queries, later if bounded else None))
            given = case.q, case.k_pages, case.v_pages
            out, lse = torch.ops.prefixkit.tree_attention(*given, case.positions, step.tensors, case.scale, key, None)
            for row in range(len(node)):
                exact = of_one(case, of, row, int(positions[row] + later[row]))
                torch.testing.assert_close(out[row].double(), exact.out[0], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(lse[row].double(), exact.lse[0], rtol=1e-4, atol=1e-5)


def of_one(case, of, row, last):
    """The oracle's answer for one query that sees nothing after ``last``: in a node that ends there."""
    node = int(case.row_node[row])
    length = case.snapshot.length.copy()
    length[node] = last + 1 - case.snapshot.start[node]
    snapshot = type(case.snapshot)(**{**vars(case.snapshot), "length": length})
    rows = slice(row, row + 1)
    places = case.row_node[rows], case.positions.numpy()[rows]
    return reference_attention(snapshot, *places, case.q[rows], case.k_pages, case.v_pages, case.scale, of)
