"""Random trees and queries for the attention tests, made through the real prefix tree."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from prefixkit.attention.bsr import BSR
from prefixkit.attention.queries import Queries
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.snapshot import TreeSnapshot


def random_tree(rng: np.random.Generator, page_size: int, sequences: int = 12) -> PrefixTree:
    """Sequences over two tokens, so that they share a lot; some forked and extended, all computed but some leaves."""
    tree = PrefixTree(4096, page_size)
    alive = []
    for _ in range(sequences):
        if alive and rng.random() < 0.4:
            sequence = tree.fork(alive[rng.integers(len(alive))])[0]
            tree.extend(sequence, rng.integers(0, 2, rng.integers(1, 9)))
        else:
            sequence = tree.insert(rng.integers(0, 2, rng.integers(1, 24)))
        alive.append(sequence)
    nodes = tree.nodes()
    inner = [node for node in nodes if node.children]
    tree.mark_computed(inner, [node.length for node in inner])
    leaves = [node for node in nodes if not node.children]
    tree.mark_computed(leaves, [int(rng.integers(0, node.length + 1)) for node in leaves])
    return tree


def random_queries(rng: np.random.Generator, snapshot: TreeSnapshot) -> Queries:
    """Runs at random nodes, inner ones among them, each beginning at or before the end of its node's KV."""
    runs = []
    for node in range(snapshot.num_nodes):
        if rng.random() < 0.6:
            begin = int(rng.integers(0, min(snapshot.computed[node], snapshot.length[node] - 1) + 1))
            end = int(rng.integers(begin + 1, snapshot.length[node] + 1))
            runs.append((node, begin, end))
    runs = runs or [(snapshot.num_nodes - 1, 0, 1)]
    return Queries(*(np.array(column, dtype=np.int32) for column in zip(*runs, strict=True)))


def expected_sight(snapshot: TreeSnapshot, queries: Queries) -> list[set[tuple[int, int]]]:
    """For each query row, the ``(node, offset)`` of every token that it must see."""
    visible = []
    for node, offset in zip(queries.row_node().tolist(), queries.row_offset().tolist(), strict=True):
        seen = {(node, i) for i in range(offset + 1)}
        ancestor = int(snapshot.parent[node])
        while ancestor >= 0:
            seen |= {(ancestor, i) for i in range(int(snapshot.length[ancestor]))}
            ancestor = int(snapshot.parent[ancestor])
        visible.append(seen)
    return visible


def assert_same_rows(ours: BSR, theirs: BSR, what: object = "") -> None:
    """Equal arrays of equal dtypes; neither has runs."""
    assert ours.runs is theirs.runs is None
    for name in (field.name for field in fields(BSR) if field.name != "runs"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert np.array_equal(one, other) and one.dtype == other.dtype, (what, name)


def row_segments(bsr, row):
    """The ``(node, begin, end)`` slices that a row of a format reads, ancestors first."""
    part = slice(int(bsr.indptr[row]), int(bsr.indptr[row + 1]))
    return list(zip(bsr.node[part].tolist(), bsr.begin[part].tolist(), bsr.end[part].tolist(), strict=True))
