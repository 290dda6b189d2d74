"""Random steps over trees with paths of shared and of adjacent nodes, and what of them is shared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.testing.forests import SHARE_ALL, SHARE_NONE, make_snapshot, random_parents
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.rows import select
from prefixkit.tree.snapshot import TreeSnapshot
from tests.attention.trees import random_queries, random_tree

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=8, itemsize=4)
COSTS = CPU_COST, SHARE_ALL, SHARE_NONE


def random_step(rng: np.random.Generator, most: int = 30) -> StepTree:
    """A tree of the prefix tree's, or any; with pages of one token, or filled ones, many nodes are adjacent."""
    if rng.random() < 0.5:
        snapshot = random_tree(rng, page_size=int(rng.choice([1, 4, 16]))).snapshot()
        return StepTree(snapshot, random_queries(rng, snapshot))
    parents = random_parents(rng, int(rng.integers(1, most)))
    lengths = rng.integers(0, 4, len(parents)) * int(rng.choice([1, 4]))
    lengths[-1] += 1
    snapshot, _ = make_snapshot(rng, parents, lengths.tolist(), int(rng.choice([1, 4])), orderly=rng.random() < 0.5)
    if rng.random() < 0.3:  # tokens are missing before a node
        node = int(rng.integers(len(parents)))
        snapshot.start[node : snapshot.subtree_end[node]] += int(rng.integers(1, 9))
    asks = np.flatnonzero(
        (lengths > 0) & ((rng.random(len(parents)) < 0.5) | (np.arange(len(parents)) + 1 == len(parents)))
    )
    begin = rng.integers(0, lengths[asks])
    columns = asks, begin, rng.integers(begin, lengths[asks]) + 1
    return StepTree(snapshot, Queries(*(column.astype(np.int32) for column in columns)))


def marks(rng: np.random.Generator, tree: StepTree) -> NDArray[np.bool_] | None:
    """What is shared: by cost, or at random."""
    return rng.random(tree.snapshot.num_nodes) < rng.choice([0.5, 0.9]) if rng.random() < 0.5 else None


def beams(width: int, steps: int) -> TreeSnapshot:
    """What so many steps of a beam search leave below a prompt, beams of all ranks surviving; all tokens have KV."""
    rng = np.random.default_rng(width)
    tree = PrefixTree(width * steps, 16)
    prompt = tree.insert(np.arange(50))
    rows = [prompt, *tree.fork(prompt, width - 1)]
    for _ in range(steps):
        rows = select(tree, rows, rng.integers(width, size=width).tolist())
        tree.extend_each(rows, rng.integers(1000, size=width).astype(np.int32))
    snapshot = tree.snapshot()
    return replace(snapshot, computed=snapshot.length.copy())
