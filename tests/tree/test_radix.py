"""PrefixTree: what is shared, what is split, what is taken and what is given back."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import PrefixTree, Sequence
from tests.tree.model import fingerprint, structure, tokens_of, uncomputed

PAGE_SIZES = [1, 2, 16, 128]


class TestInsert:
    def test_one_sequence_is_one_node(self) -> None:
        tree = PrefixTree(8, page_size=4)
        sequence = tree.insert([1, 2, 3, 4, 5])
        assert tokens_of(tree) == [([1, 2, 3, 4, 5], [0, 1], 0)]
        assert (sequence.length, sequence.tokens().tolist()) == (5, [1, 2, 3, 4, 5])
        check_tree(tree)

    def test_a_split_shares_the_page_it_cuts_and_the_newcomer_starts_on_a_fresh_one(self) -> None:
        tree = PrefixTree(8, page_size=4)
        tree.insert([1, 2, 3, 4, 5, 6, 7])
        tree.insert([1, 2, 3, 4, 5, 9])
        assert tokens_of(tree) == [([1, 2, 3, 4, 5], [0, 1], 0), ([6, 7], [1], 1), ([9], [2], 0)]
        assert tree.allocator.refcounts.tolist() == [1, 2, 1, 0, 0, 0, 0, 0]
        check_tree(tree)

    def test_a_split_between_pages_shares_none(self) -> None:
        tree = PrefixTree(8, page_size=4)
        tree.insert([1, 2, 3, 4, 5, 6, 7])
        tree.insert([1, 2, 3, 4, 9])
        assert tokens_of(tree) == [([1, 2, 3, 4], [0], 0), ([5, 6, 7], [1], 0), ([9], [2], 0)]
        check_tree(tree)

    def test_three_nodes_may_hold_one_page(self) -> None:
        tree = PrefixTree(8, page_size=4)
        first = tree.insert([1, 2, 3])
        tree.insert([1, 2])
        tree.insert([1])
        assert tokens_of(tree) == [([1], [0], 0), ([2], [0], 1), ([3], [0], 2)]
        tree.extend(first, [4, 5])  # the deepest of the chain holds the highest slots: the rest of the page is its own
        assert tokens_of(tree)[2] == ([3, 4, 5], [0, 1], 2)
        assert tree.allocator.refcounts.tolist() == [3, 1, 0, 0, 0, 0, 0, 0]
        check_tree(tree)

    def test_a_prefix_of_another_ends_at_the_upper_half(self) -> None:
        tree = PrefixTree(8, page_size=4)
        long = tree.insert([1, 2, 3])
        short = tree.insert([1, 2])
        assert (short.tokens().tolist(), long.tokens().tolist()) == ([1, 2], [1, 2, 3])
        assert long.node.parent is short.node
        assert tree.allocator.free == 7

    def test_an_extension_of_another_becomes_its_child(self) -> None:
        tree = PrefixTree(8, page_size=4)
        short = tree.insert([1, 2])
        long = tree.insert([1, 2, 3])
        assert long.node.parent is short.node
        assert tokens_of(tree) == [([1, 2], [0], 0), ([3], [0], 2)]
        tree.extend(short, [4])  # the page's last slots belong to the other
        assert tokens_of(tree)[2] == ([4], [1], 0)
        check_tree(tree)

    def test_a_duplicate_takes_nothing(self) -> None:
        tree = PrefixTree(8, page_size=4)
        first, version = tree.insert([1, 2, 3]), tree.version
        again = tree.insert([1, 2, 3])
        assert first.node is again.node
        assert (tree.allocator.free, tree.version) == (7, version)

    def test_no_common_first_token_makes_a_forest(self) -> None:
        tree = PrefixTree(8, page_size=4)
        for first in (5, 6, 7):
            tree.insert([first, 1, 1])
        assert tree.snapshot().parent.tolist() == [-1, -1, -1]
        check_tree(tree)

    def test_a_growing_leaf_can_be_split_and_its_sequence_grows_on(self) -> None:
        tree = PrefixTree(8, page_size=4)
        growing = tree.insert([1, 2])
        tree.extend(growing, [3, 4, 5])
        other = tree.insert([1, 2, 3, 7])
        tree.extend(growing, [6])
        assert growing.tokens().tolist() == [1, 2, 3, 4, 5, 6]
        assert other.tokens().tolist() == [1, 2, 3, 7]
        assert growing.node.tokens.tolist() == [4, 5, 6]
        check_tree(tree)

    def test_the_caller_keeps_its_array(self) -> None:
        tree, mine = PrefixTree(8), np.array([1, 2, 3], np.int32)
        inserted = tree.insert(mine)
        forked = tree.fork(inserted)[0]
        tree.extend(forked, mine)
        mine[:] = 9
        assert forked.tokens().tolist() == [1, 2, 3, 1, 2, 3]


class TestForkAndExtend:
    def test_a_fork_takes_no_pages(self) -> None:
        tree = PrefixTree(2, page_size=4)
        sequence = tree.insert([1, 2])
        forks = tree.fork(sequence, 3)
        assert [fork.tokens().tolist() for fork in forks] == [[1, 2]] * 3
        assert (tree.allocator.free, len(tree.nodes())) == (1, 1)
        assert len({fork.id for fork in [sequence, *forks]}) == 4

    def test_a_lone_leaf_grows_in_place_and_keeps_its_version(self) -> None:
        tree = PrefixTree(4, page_size=4)
        sequence, version = tree.insert([1, 2, 3]), tree.version
        node = sequence.node
        tree.extend(sequence, [4, 5])
        tree.extend_each([sequence], [6])
        assert sequence.node is node
        assert tree.version == version
        assert tokens_of(tree) == [([1, 2, 3, 4, 5, 6], [0, 1], 0)]

    def test_the_first_fork_to_grow_continues_in_the_page_and_the_others_start_pages(self) -> None:
        for one_by_one in (False, True):
            tree = PrefixTree(4, page_size=4)
            sequence = tree.insert([1, 2])
            forks = tree.fork(sequence, 2)
            for some in [[fork] for fork in forks] if one_by_one else [forks]:
                tree.extend_each(some, [3] * len(some))
            tree.extend_each([*forks, sequence], [4, 5, 6])
            assert tokens_of(tree) == [([1, 2], [0], 0), ([3, 4], [0], 2), ([3, 5], [1], 0), ([6], [2], 0)]
            assert tree.allocator.refcounts.tolist() == [2, 1, 1, 0]
            check_tree(tree)

    def test_slots_that_the_continuation_left_are_taken_by_the_next_child(self) -> None:
        tree = PrefixTree(4, page_size=4)
        sequence = tree.insert([1, 2])
        first, second, third = tree.fork(sequence, 3)
        tree.extend_each([first, second], [3, 4])
        tree.release(first)
        tree.extend(third, [5])
        assert tokens_of(tree) == [([1, 2], [0], 0), ([4], [1], 0), ([5], [0], 2)]
        check_tree(tree)

    def test_match_follows_the_first_of_equal_siblings_and_its_successor(self) -> None:
        tree = PrefixTree(8, page_size=4)
        first = tree.insert([1])
        second = tree.fork(first)[0]
        tree.extend(first, [2, 3])
        tree.extend(second, [2, 4])
        assert tree.match([1, 2, 4]).length == 2
        tree.release(first)
        assert tree.match([1, 2, 4]).length == 3
        check_tree(tree)

    def test_pages_to_extend_is_what_extend_takes_at_most(self) -> None:
        for page_size, taken in ((1, (5, 5, 5)), (2, (2, 3, 3)), (16, (0, 1, 0))):
            tree = PrefixTree(100, page_size)
            sequence = tree.insert([1, 2, 3])
            fork = tree.fork(sequence)[0]
            for handle, expected in zip((fork, sequence, fork), taken, strict=True):
                most, free = tree.pages_to_extend(handle, 5), tree.allocator.free
                tree.extend(handle, [7] * 5)
                assert free - tree.allocator.free == expected <= most

    def test_a_step_without_sequences_is_no_step(self) -> None:
        tree = PrefixTree(1)
        tree.extend_each([], [])
        check_tree(tree)
        assert tree.nodes() == [] and tree.allocator.free == 1

    def test_extend_each_equals_extending_each(self) -> None:
        def build() -> tuple[PrefixTree, list[Sequence]]:
            tree = PrefixTree(64, page_size=2)
            lone, twice = tree.insert([1, 2]), tree.insert([1, 3, 4])
            inner = tree.insert([1])
            return tree, [lone, twice, *tree.fork(twice), inner]

        together, handles = build()
        apart, others = build()
        for step in range(5):
            tokens = [10 * step + i for i in range(len(handles))]
            together.extend_each(handles, tokens)
            for sequence, token in zip(others, tokens, strict=True):
                apart.extend(sequence, [token])
            check_tree(together)
        assert structure(together) == structure(apart)


class TestRelease:
    def test_it_undoes_splits(self) -> None:
        for page_size in PAGE_SIZES:
            tree = PrefixTree(64, page_size)
            tree.insert(range(40))
            before = (tokens_of(tree), tree.allocator.free)
            others = [tree.insert([*range(cut), 99, cut]) for cut in (1, 2, 16, 17, 39)]
            for other in others:
                tree.release(other)
                check_tree(tree)
            assert (tokens_of(tree), tree.allocator.free) == before

    def test_beams_on_pages_of_one_token_stay_compact(self) -> None:
        rng = np.random.default_rng(0)
        tree = PrefixTree(4096, page_size=1)
        beams = [tree.insert([1, 2, 3])]
        for _ in range(50):
            survivors = rng.integers(0, len(beams), 4)
            forks = [tree.fork(beams[i])[0] for i in survivors]
            for beam in beams:
                tree.release(beam)
            tree.extend_each(forks, rng.integers(0, 100, 4))
            beams = forks
            check_tree(tree)
            assert len(tree.nodes()) <= 2 * len(beams)

    def test_a_fork_that_is_left_alone_merges_where_its_slots_meet(self) -> None:
        for left, expected in ((0, [([1, 2, 3], [0], 0)]), (1, [([1, 2], [0], 0), ([4], [1], 0)])):
            tree = PrefixTree(8, page_size=4)
            first = tree.insert([1, 2])
            forks = tree.fork(first, 2)
            tree.extend_each(forks, [3, 4])
            tree.release(first)
            tree.release(forks[1 - left])
            assert tokens_of(tree) == expected
            check_tree(tree)

    def test_a_fork_at_a_page_boundary_merges(self) -> None:
        tree = PrefixTree(8, page_size=2)
        first = tree.insert([1, 2])
        second = tree.fork(first)[0]
        tree.extend(first, [3])
        tree.release(second)
        assert tokens_of(tree) == [([1, 2, 3], [0, 1], 0)]
        check_tree(tree)

    def test_a_sequence_that_ends_between_keeps_the_split(self) -> None:
        tree = PrefixTree(8, page_size=4)
        tree.insert([1, 2, 3])
        equal = [tree.insert([1, 2]) for _ in range(2)]
        tree.release(equal[0])
        assert len(tree.nodes()) == 2
        tree.release(equal[1])
        assert len(tree.nodes()) == 1

    def test_the_upper_half_that_is_left_grows_on_in_the_page_it_shared(self) -> None:
        tree = PrefixTree(2, page_size=4)
        long = tree.insert([1, 2, 3])
        short = tree.insert([1, 2])
        tree.release(long)
        tree.extend(short, [7, 8])
        assert tokens_of(tree) == [([1, 2, 7, 8], [0], 0)]
        check_tree(tree)

    def test_twice_is_an_error(self) -> None:
        tree = PrefixTree(8)
        sequence = tree.insert([1])
        tree.release(sequence)
        with pytest.raises(ValueError, match="has been released"):
            tree.release(sequence)
        with pytest.raises(ValueError, match="has been released"):
            sequence.tokens()
        assert "released" in repr(sequence)


class TestTrim:
    def test_a_lone_leaf_shrinks_in_place(self) -> None:
        tree = PrefixTree(8, page_size=2)
        sequence = tree.insert([1, 2, 3, 4, 5])
        tree.mark_computed([sequence.node], [4])
        version = tree.version
        tree.trim(sequence, 2)
        assert (sequence.tokens().tolist(), sequence.node.computed, tree.allocator.free) == ([1, 2], 2, 7)
        assert tree.version > version  # a plan may rely on lengths that only grow
        tree.extend(sequence, [6])
        assert sequence.tokens().tolist() == [1, 2, 6]
        assert uncomputed(tree) == [(sequence.node, 2, 3)]
        check_tree(tree)

    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_it_leaves_what_inserting_the_shorter_one_makes(self, page_size: int) -> None:
        for length in range(1, 9):
            tree, expected = PrefixTree(64, page_size), PrefixTree(64, page_size)
            for other in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 9], [1, 2, 3, 4, 5, 9]):
                tree.insert(other)
                expected.insert(other)
            sequence = tree.insert([1, 2, 3, 4, 5, 6, 7, 8])
            tree.trim(sequence, length)
            expected.insert(range(1, length + 1))
            assert structure(tree) == structure(expected)
            check_tree(tree)

    def test_to_nothing_and_back(self) -> None:
        tree = PrefixTree(8, page_size=4)
        sequence = tree.insert([1, 2])
        tree.trim(sequence, 0)
        assert (sequence.length, sequence.node, tree.allocator.free) == (0, tree.root, 8)
        assert tree.snapshot().sequence_node.tolist() == [-1]
        assert len(tree.snapshot().sequence_id) == 1
        tree.extend_each([sequence], [5])
        tree.extend(sequence, [6])
        assert tokens_of(tree) == [([5, 6], [0], 0)]
        check_tree(tree)

    def test_to_its_own_length_changes_nothing(self) -> None:
        tree = PrefixTree(8)
        sequence = tree.insert([1, 2])
        before = fingerprint(tree)
        tree.trim(sequence, 2)
        assert fingerprint(tree) == before

    @pytest.mark.parametrize("length", [-1, 3])
    def test_not_beyond_its_bounds(self, length: int) -> None:
        tree = PrefixTree(8)
        sequence = tree.insert([1, 2])
        with pytest.raises(ValueError, match="cannot trim"):
            tree.trim(sequence, length)
