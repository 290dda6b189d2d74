"""PrefixTree.compact: chains of short nodes, which beams leave behind, become one node each."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import PrefixTree, Sequence
from tests.tree.model import RememberingPool


def zigzag(steps: int, page_size: int = 4, num_pages: int = 200) -> tuple[PrefixTree, RememberingPool, Sequence]:
    """A sequence of ``1 + steps`` tokens after a prompt of a page: at each step it was the second of two forks."""
    tree = PrefixTree(num_pages, page_size)
    pool = RememberingPool(tree)
    prompt = tree.insert([9] * page_size)
    beam = tree.fork(prompt)[0]
    tree.extend(beam, [9])
    for step in range(steps):
        pool.compute()
        other = beam
        beam = tree.fork(other)[0]
        tree.extend_each([other, beam], [step, step + 1])
        pool.compute()
        tree.release(other)
    return tree, pool, beam


def lengths(tree: PrefixTree) -> list[int]:
    return [node.length for node in tree.nodes()]


class TestChainsOfShortNodes:
    @pytest.mark.parametrize("page_size", [4, 8, 16])
    def test_become_one_node_with_the_same_kv(self, page_size: int) -> None:
        tree, pool, beam = zigzag(8 * page_size, page_size)
        tokens, nodes = beam.tokens().tolist(), len(tree.nodes())
        pool.copy(*tree.compact(tree.allocator.free))
        check_tree(tree)
        assert len(tree.nodes()) < nodes / 2
        assert beam.tokens().tolist() == tokens
        pool.assert_holds(beam.id, tokens)

    def test_go_on_in_the_node_before_where_that_has_free_slots(self) -> None:
        tree, pool, beam = zigzag(20)
        pool.copy(*tree.compact(tree.allocator.free))
        before = lengths(tree)
        for step in range(20):
            other = beam
            beam = tree.fork(other)[0]
            tree.extend_each([other, beam], [step, step + 1])
            pool.compute()
            tree.release(other)
        pool.copy(*tree.compact(tree.allocator.free))
        check_tree(tree)
        assert max(lengths(tree)) >= max(before) + 16
        pool.assert_holds(beam.id, beam.tokens().tolist())

    def test_stay_where_they_are_short_or_uncomputed(self) -> None:
        short, _, _ = zigzag(4)
        uncomputed, _, _ = zigzag(30)
        uncomputed.mark_computed(uncomputed.nodes(), [0] * len(uncomputed.nodes()))
        for tree in (short, uncomputed):
            version = tree.version
            source, target = tree.compact(tree.allocator.free)
            assert len(source) == len(target) == 0
            assert tree.version == version

    def test_leave_the_nodes_that_end_sequences(self) -> None:
        tree, pool, beam = zigzag(30)
        node = next(node for node in tree.nodes() if node.start > 16)
        held = tree.insert(beam.tokens()[: node.start])
        pool.copy(*tree.compact(tree.allocator.free))
        check_tree(tree)
        pool.assert_holds(held.id, held.tokens().tolist())
        pool.assert_holds(beam.id, beam.tokens().tolist())

    def test_leave_the_nodes_that_are_kept(self) -> None:
        tree, pool, beam = zigzag(30)
        node = next(node for node in tree.nodes() if node.start > 16)
        tree.retain(tree.insert(beam.tokens()[: node.start]))
        pool.copy(*tree.compact(tree.allocator.free))
        check_tree(tree)
        assert tree.num_cached == 1
        pool.assert_holds(beam.id, beam.tokens().tolist())

    def test_take_no_more_pages_than_are_granted(self) -> None:
        tree, pool, beam = zigzag(60)
        free = tree.allocator.free
        assert len(tree.compact(1)[0]) == 0
        assert tree.allocator.free == free

    def test_give_their_pages_back(self) -> None:
        tree, pool, beam = zigzag(100)
        free = tree.allocator.free
        pool.copy(*tree.compact(free))
        assert tree.allocator.free >= free
        tree.release(beam)
        check_tree(tree)


def test_beams_stay_shallow_and_keep_their_kv() -> None:
    rng = np.random.default_rng(1)
    tree = PrefixTree(2000, 16)
    pool = RememberingPool(tree)
    beams = tree.fork(tree.insert([1] * 20), 8)
    deepest = 0
    for step in range(400):
        parents = np.sort(rng.integers(0, 8, 8))
        going_on = [tree.fork(beams[parent])[0] for parent in parents]
        for beam in beams:
            tree.release(beam)
        beams = going_on
        tree.extend_each(beams, rng.integers(0, 50, 8))
        pool.compute()
        if step % 8 == 7:
            pool.copy(*tree.compact(tree.allocator.free))
            check_tree(tree)
            deepest = max(deepest, int(tree.snapshot().depth().max()))
            for beam in beams:
                pool.assert_holds(beam.id, beam.tokens().tolist())
    assert deepest < 40
