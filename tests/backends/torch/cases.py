"""Steps over trees of which runs of tokens are queries."""

from __future__ import annotations

import numpy as np
import torch

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.testing.forests import (
    Case,
    fill,
    make_snapshot,
)


def tree_case(
    parents: list[int],
    lengths: list[int],
    runs: list[tuple[int, int, int]],
    *,
    heads: tuple[int, int, int] = (6, 2, 32),
    orderly: bool = True,
    page_size: int = 16,
) -> Case:
    rng = np.random.default_rng(0)
    snapshot, num_pages = make_snapshot(rng, parents, lengths, page_size, orderly=orderly)
    queries = Queries(*(np.array(column, dtype=np.int32) for column in zip(*runs, strict=True)))
    return fill(rng, snapshot, num_pages, queries, heads, torch.float32)


def decode_case(shared: int, leaves: list[int]) -> Case:
    """One shared node and leaves that decode."""
    runs = [(leaf, length - 1, length) for leaf, length in enumerate(leaves, 1)]
    return tree_case([-1] + [0] * len(leaves), [shared, *leaves], runs)


def step_tree(case: Case) -> StepTree:
    return StepTree(case.snapshot, case.queries)
