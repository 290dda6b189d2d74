"""PrefixTree: what must not matter, what is kept from one snapshot to the next, and depth."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import PrefixTree
from tests.tree.model import assert_snapshot_is_fresh, structure, uncomputed

PAGE_SIZES = [1, 2, 16, 128]


class TestEquivalence:
    @pytest.mark.parametrize("seed", range(10))
    def test_insertion_order_and_page_size_do_not_change_the_tree(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sequences = [rng.integers(0, 3, rng.integers(1, 12)).tolist() for _ in range(30)]
        trees = []
        for page_size in PAGE_SIZES:
            tree = PrefixTree(1024, page_size)
            for index in rng.permutation(len(sequences)):
                tree.insert(sequences[index])
            check_tree(tree)
            trees.append(structure(tree))
        assert all(tree == trees[0] for tree in trees)

    @pytest.mark.parametrize("seed", range(10))
    def test_inserting_and_releasing_others_leaves_no_trace(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        tree, expected = PrefixTree(1024, page_size=1), PrefixTree(1024, page_size=1)
        guests = []
        for _ in range(30):
            tokens = rng.integers(0, 3, rng.integers(1, 12))
            if rng.random() < 0.5:
                guests.append(tree.insert(tokens))
            else:
                tree.insert(tokens)
                expected.insert(tokens)
        for guest in rng.permutation(np.array(guests, object)):
            tree.release(guest)
        check_tree(tree)
        assert structure(tree) == structure(expected)


class TestSnapshotCache:
    def test_the_same_object_while_nothing_changes(self) -> None:
        tree = PrefixTree(8)
        sequence = tree.insert([1, 2])
        snapshot = tree.snapshot()
        assert tree.snapshot() is snapshot
        tree.mark_computed([sequence.node], [1])
        assert tree.snapshot() is not snapshot

    def test_growth_leaves_an_earlier_snapshot_as_it_was(self) -> None:
        tree = PrefixTree(8, page_size=2)
        first, second = tree.insert([1, 2]), tree.insert([3])
        before = tree.snapshot()
        tree.extend_each([first, second], [4, 5])
        tree.mark_computed(tree.nodes(), [3, 1])
        after = tree.snapshot()
        assert before.version == after.version
        assert (before.length.tolist(), before.pages.tolist(), before.computed.tolist()) == ([2, 1], [0, 1], [0, 0])
        assert (after.length.tolist(), after.pages.tolist(), after.computed.tolist()) == ([3, 2], [0, 2, 1], [3, 1])

    def test_a_fork_shows_without_a_new_structure(self) -> None:
        tree = PrefixTree(8)
        sequence = tree.insert([1, 2])
        before = tree.snapshot()
        tree.fork(sequence, 2)
        after = tree.snapshot()
        assert (after.version, after.sequence_node.tolist()) == (before.version, [0, 0, 0])

    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_refreshing_equals_rebuilding(self, page_size: int) -> None:
        rng = np.random.default_rng(page_size)
        tree = PrefixTree(4096, page_size)
        handles = [tree.insert(rng.integers(0, 3, rng.integers(1, 12))) for _ in range(40)]
        tree.extend_each(handles, rng.integers(0, 9, len(handles)))
        for _ in range(60):
            chosen = [handle for handle in handles if rng.random() < 0.4]
            tree.extend_each(chosen, rng.integers(0, 9, len(chosen)))
            if rng.random() < 0.2:
                tree.extend(handles[0], rng.integers(0, 9, rng.integers(1, 300 // page_size + 3)))
            if rng.random() < 0.5:
                waiting = uncomputed(tree)
                tree.mark_computed([node for node, _, _ in waiting], [length for _, _, length in waiting])
            assert_snapshot_is_fresh(tree)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_chain_of_ten_thousand_nodes(page_size: int) -> None:
    depth = 10_000
    tree = PrefixTree(2 * depth, page_size)
    sequence = tree.insert([0])
    waypoints = []
    for token in range(1, depth):
        waypoints += tree.fork(sequence)  # ends here, so that the next token starts a child
        tree.extend(sequence, [token])
    branch = tree.insert([*range(depth - 2), 7])

    assert len(tree.nodes()) == depth + 1
    assert int(tree.snapshot().depth().max()) + 1 == depth
    assert tree.match(range(depth)).length == depth
    assert sequence.tokens().tolist() == list(range(depth))
    check_tree(tree)
    for waypoint in waypoints:
        tree.release(waypoint)
    check_tree(tree)
    assert sequence.tokens().tolist() == list(range(depth))
    assert len(tree.nodes()) == 3
    tree.release(branch)
    tree.release(sequence)
    assert tree.allocator.free == 2 * depth
