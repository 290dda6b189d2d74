"""TreeSnapshot: the tree as flat arrays."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.tree import PrefixTree
from tests.seeds import seeds
from tests.tree.model import uncomputed


def small_tree() -> PrefixTree:
    """1 2 3 ┬ 8
    └ 4 5 ┬ 6
    └ 7    and 9, a tree of its own: the child with the most leaves comes last."""
    tree = PrefixTree(16, page_size=2)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 8], [9]):
        tree.insert(tokens)
    return tree


def test_arrays_of_a_small_tree() -> None:
    snapshot = small_tree().snapshot()
    assert snapshot.parent.tolist() == [-1, 0, 0, 2, 2, -1]
    assert snapshot.subtree_end.tolist() == [5, 2, 5, 4, 5, 6]
    assert snapshot.start.tolist() == [0, 3, 3, 5, 5, 0]
    assert snapshot.length.tolist() == [3, 1, 2, 1, 1, 1]
    assert snapshot.first_slot.tolist() == [0, 0, 1, 1, 0, 0]
    assert snapshot.page_indptr.tolist() == [0, 2, 3, 5, 6, 7, 8]
    assert snapshot.pages.tolist() == [0, 1, 4, 1, 2, 2, 3, 5]
    assert snapshot.sequence_node.tolist() == [1, 3, 4, 5]
    assert snapshot.sequence_id.tolist() == [2, 0, 1, 3]
    assert (snapshot.num_nodes, snapshot.num_tokens) == (6, 9)


def test_depth_and_sharing() -> None:
    snapshot = small_tree().snapshot()
    assert snapshot.depth().tolist() == [0, 1, 1, 2, 2, 0]
    assert snapshot.shared_by().tolist() == [3, 1, 2, 1, 1, 1]


def test_slots_are_page_times_page_size_plus_offset() -> None:
    snapshot = small_tree().snapshot()
    assert snapshot.slots(np.array([2, 2, 3, 4]), np.array([0, 1, 0, 0])).tolist() == [3, 4, 5, 6]


def test_an_empty_tree_has_empty_arrays() -> None:
    tree = PrefixTree(1)
    snapshot = tree.snapshot()
    assert (snapshot.num_nodes, snapshot.num_tokens, tree.nodes(), uncomputed(tree)) == (0, 0, [], [])
    assert (snapshot.page_indptr.tolist(), snapshot.depth().tolist(), snapshot.shared_by().tolist()) == ([0], [], [])


@pytest.mark.parametrize("seed", range(5))
def test_random_trees_agree_with_their_nodes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = PrefixTree(4096, page_size=4)
    handles = [tree.insert(rng.integers(0, 3, rng.integers(1, 12))) for _ in range(40)]
    handles.append(tree.insert([1]))
    tree.trim(handles[-1], 0)
    snapshot, nodes = tree.snapshot(), tree.nodes()
    for index, node in enumerate(nodes):
        assert node.index == index
        above = [] if node.parent is None else [node.parent]
        assert above == ([nodes[snapshot.parent[index]]] if snapshot.parent[index] >= 0 else [tree.root])
        subtree = [node]
        for inside in subtree:
            subtree.extend(inside.children)
        assert {inside.index for inside in subtree} == set(range(index, snapshot.subtree_end[index]))
        assert snapshot.shared_by()[index] == sum(len(inside.sequences) for inside in subtree)
        depth, parent = -1, node.parent
        while parent is not None:
            depth, parent = depth + 1, parent.parent
        assert snapshot.depth()[index] == depth
    ends = dict(zip(snapshot.sequence_id.tolist(), snapshot.sequence_node.tolist(), strict=True))
    assert ends == {handle.id: handle.node.index for handle in handles}


@seeds(20)
def test_the_child_with_the_most_leaves_is_listed_last_and_the_others_as_they_came(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = PrefixTree(4096, page_size=4)
    for _ in range(60):
        tree.insert(rng.integers(0, 2, rng.integers(1, 16)))
    snapshot, nodes = tree.snapshot(), tree.nodes()
    leaves = np.concatenate(([0], np.cumsum(snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1)))
    below = leaves[snapshot.subtree_end] - leaves[:-1]
    for index, node in enumerate(nodes):
        children = [nodes[child] for child in np.flatnonzero(snapshot.parent == index)]
        assert set(children) == set(node.children)
        if children:
            *others, last = children
            assert below[last.index] == max(below[child.index] for child in children)
            assert others == [child for child in node.children if child is not last]
            alike = [child for child in node.children if below[child.index] == below[last.index]]
            assert last is alike[-1], "of equally heavy ones the last"
