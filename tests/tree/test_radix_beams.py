"""PrefixTree under beam search: where the tokens of beams that fork and die lie, and how many slots they waste."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import PrefixTree, Sequence


def fork_all(tree: PrefixTree, parent: Sequence, count: int) -> list[Sequence]:
    """``count`` sequences in the place of ``parent``, each a token longer."""
    beams = [parent, *tree.fork(parent, count - 1)]
    tree.extend_each(beams, range(10, 10 + count))
    check_tree(tree)
    return beams


def places(sequences: list[Sequence]) -> list[tuple[list[int], int]]:
    return [(one.node.pages.tolist(), one.node.first_slot) for one in sequences]


class TestForkOfBeams:
    def test_the_third_and_those_after_it_share_a_page_with_room_to_grow_and_the_third_grows_on(self) -> None:
        tree = PrefixTree(8, page_size=8)
        beams = fork_all(tree, tree.insert([1, 2]), 5)
        assert places(beams) == [([0], 2), ([1], 0), ([2], 6), ([2], 3), ([2], 0)]
        tree.extend_each(beams, [7] * 5)
        tree.extend_each(beams, [8] * 5)
        assert places(beams) == [([0], 2), ([1], 0), ([2, 3], 6), ([2], 3), ([2], 0)]
        check_tree(tree)
        tree.extend_each(beams, [9] * 5)  # the fourth and the fifth have come to the slots of the one behind
        assert [one.node.start for one in beams] == [2, 2, 2, 5, 5]
        assert tree.allocator.refcounts.tolist() == [2, 1, 3, 1, 1, 1, 0, 0]
        check_tree(tree)

    def test_a_leaf_grows_on_once_those_behind_it_are_gone(self) -> None:
        tree = PrefixTree(8, page_size=8)
        first, second, third, fourth, fifth = fork_all(tree, tree.insert([1, 2]), 5)
        tree.release(fourth)
        tree.release(third)
        check_tree(tree)
        tree.extend(fifth, range(20))
        assert places([fifth]) == [([2, 3, 4], 0)]
        check_tree(tree)

    def test_a_split_of_a_leaf_leaves_the_slots_behind_it_to_those_that_hold_them(self) -> None:
        tree = PrefixTree(8, page_size=8)
        beams = fork_all(tree, tree.insert([1, 2]), 5)
        tree.extend_each(beams, [7] * 5)
        fork = tree.fork(beams[4])[0]
        tree.trim(beams[4], 3)
        check_tree(tree)
        assert places([beams[4], fork, *beams[3:1:-1]]) == [([2], 0), ([2], 1), ([2], 3), ([2], 6)]
        tree.release(fork)
        tree.extend_each([beams[4]], [8])
        assert places([beams[4]]) == [([2], 0)]
        check_tree(tree)

    def test_more_tokens_than_there_is_room_for_start_a_child(self) -> None:
        for count, start in ((2, 2), (3, 3)):
            tree = PrefixTree(8, page_size=8)
            fifth = fork_all(tree, tree.insert([1, 2]), 5)[4]
            tree.extend(fifth, range(count))
            assert fifth.node.start == start
            check_tree(tree)
            tree.trim(fifth, 3)
            assert fifth.node.start == 2
            check_tree(tree)

    def test_samples_of_a_prompt_that_is_kept_get_leaves_that_only_grow(self) -> None:
        tree = PrefixTree(64, page_size=16)
        samples = tree.fork(tree.insert([1, 2]), 16)
        tree.extend_each(samples, range(16))
        tree.reserve(samples, [40] * 16)
        for _ in range(40):
            tree.extend_each(samples, range(16))
        assert len(tree.nodes()) == 17
        check_tree(tree)


class TestFreeSlotsOfAncestors:
    def test_the_nearest_that_has_some_gives_them_to_a_child_that_cannot_continue_its_parent(self) -> None:
        tree = PrefixTree(8, page_size=8)
        first, second = fork_all(tree, tree.insert([1, 2]), 2)
        tree.release(first)  # six slots are free behind the root's child
        beams = fork_all(tree, second, 3)
        assert places(beams) == [([1], 1), ([0], 2), ([2], 0)]
        tree.release(beams[1])
        assert places(fork_all(tree, beams[2], 2)) == [([2], 1), ([0], 2)]

    def test_a_new_sequence_takes_them_too(self) -> None:
        tree = PrefixTree(8, page_size=8)
        long, other = tree.insert([1, 2, 3]), tree.insert([1, 2, 4, 5])
        tree.release(long)
        assert places([tree.insert([1, 2, 4, 6, *range(9)])]) == [([0, 2], 2)]
        check_tree(tree)
        assert other.tokens().tolist() == [1, 2, 4, 5]

    def test_a_page_is_free_once_the_ancestor_is(self) -> None:
        tree = PrefixTree(8, page_size=8)
        prompt = tree.insert([1, 2])
        first, second = fork_all(tree, tree.fork(prompt)[0], 2)
        tree.release(first)
        beams = fork_all(tree, second, 3)
        for one in [*beams, prompt]:
            tree.release(one)
            check_tree(tree)
        assert tree.allocator.free == 8


@pytest.mark.parametrize(("skew", "every"), [(0.1, 0), (0.5, 16), (1.0, 0), (1.0, 16)])
def test_tokens_of_beams_fill_most_of_their_pages(skew: float, every: int) -> None:
    """The beam of rank ``r`` is continued by each new beam with a probability that falls as ``exp(-skew * r)``.

    Without copies, and with those of every 16th step.
    """
    rng, page_size, prompts, width, steps = np.random.default_rng(0), 16, 16, 8, 128
    tree = PrefixTree(10_000, page_size)
    roots = [tree.insert([prompt] * page_size) for prompt in range(prompts)]
    searches = [fork_all(tree, tree.fork(root)[0], width) for root in roots]
    weights = np.exp(-skew * np.arange(width))
    for step in range(steps):
        for beams in searches:
            parents = np.sort(rng.choice(width, width, p=weights / weights.sum()))
            going_on = [tree.fork(beams[parent])[0] for parent in parents]
            for beam in beams:
                tree.release(beam)
            beams[:] = going_on
        growing = [beam for beams in searches for beam in beams]
        tree.extend_each(growing, rng.integers(0, 1000, len(growing)))
        tree.mark_computed(tree.nodes(), [node.length for node in tree.nodes()])
        if every and step % every == every - 1:
            tree.compact(tree.allocator.free)
    check_tree(tree)
    held = (tree.allocator.num_pages - tree.allocator.free - prompts) * page_size
    own = tree.snapshot().num_tokens - prompts * page_size
    assert own / held >= 0.6
