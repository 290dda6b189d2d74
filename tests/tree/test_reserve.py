"""PrefixTree.reserve: pages after a leaf's tokens, that it or its first child grows on."""

from __future__ import annotations

import pytest

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import OutOfPages, PrefixTree
from tests.tree.model import fingerprint, tokens_of


class TestReserve:
    def test_a_leaf_grows_on_its_reserved_pages(self) -> None:
        tree = PrefixTree(8, page_size=2)
        sequence, other = tree.insert([1, 2, 3]), tree.insert([9])
        tree.reserve([sequence], [6])
        assert tokens_of(tree)[0] == ([1, 2, 3], [0, 1, 3, 4, 5], 0)
        snapshot = tree.snapshot()
        assert (snapshot.pages.tolist(), snapshot.length.tolist()) == ([0, 1, 3, 4, 5, 2], [3, 1])
        tree.extend_each([other, sequence], [8, 4])
        tree.extend(sequence, [5, 6])
        tree.extend_each([sequence], [7])
        assert tokens_of(tree)[0] == ([1, 2, 3, 4, 5, 6, 7], [0, 1, 3, 4, 5], 0)
        assert (sequence.node.reserved, tree.allocator.free) == (1, 2)
        check_tree(tree)
        tree.release(sequence)
        assert tree.allocator.free == 7
        check_tree(tree)

    def test_it_sets_what_is_reserved_and_gives_back_what_is_more(self) -> None:
        tree = PrefixTree(8, page_size=2)
        sequence = tree.insert([1])
        free = []
        for tokens in (0, 1, 2, 9, 3, 3, 0):
            before = tree.snapshot()
            tree.reserve([sequence], [tokens])
            free.append(tree.allocator.free)
            after = tree.snapshot()
            assert after.version > before.version or len(after.pages) >= len(before.pages)
            check_tree(tree)
        assert free == [7, 7, 6, 3, 6, 6, 7]

    def test_the_first_child_inherits_it(self) -> None:
        tree = PrefixTree(8, page_size=2)
        sequence = tree.insert([1])
        tree.reserve([sequence], [4])
        fork = tree.fork(sequence)[0]
        tree.extend_each([fork, sequence], [2, 3])
        assert tokens_of(tree) == [([1], [0], 0), ([2], [0, 1, 2], 1), ([3], [3], 0)]
        assert (fork.node.reserved, sequence.node.reserved) == (2, 0)
        check_tree(tree)

    def test_a_split_leaves_it_to_the_leaf(self) -> None:
        tree = PrefixTree(8, page_size=2)
        sequence = tree.insert([1, 2, 3])
        tree.reserve([sequence], [3])
        other = tree.insert([1, 4])
        assert tokens_of(tree) == [([1], [0], 0), ([2, 3], [0, 1, 2], 1), ([4], [3], 0)]
        tree.release(other)
        tree.extend(sequence, [5, 6, 7])
        assert tokens_of(tree) == [([1, 2, 3, 5, 6, 7], [0, 1, 2], 0)]
        check_tree(tree)

    def test_what_it_refuses_changes_nothing(self) -> None:
        tree = PrefixTree(4, page_size=2)
        sequence, second = tree.insert([1]), tree.insert([2])
        before = fingerprint(tree)
        with pytest.raises(OutOfPages, match="asked for 3 pages, but only 2 of 4"):
            tree.reserve([sequence, second], [3, 5])
        assert fingerprint(tree) == before
        tree.fork(second)
        before = fingerprint(tree)
        with pytest.raises(ValueError, match="shares its last node"):
            tree.reserve([sequence, second], [1, 1])
        assert fingerprint(tree) == before
