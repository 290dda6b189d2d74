"""Which tokens of a prefix tree have KV: as nodes split and merge, and once all of it is invalidated."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import PrefixTree
from tests.tree.model import structure_of, uncomputed


class TestReadiness:
    def test_a_split_divides_it(self) -> None:
        tree = PrefixTree(8, page_size=4)
        sequence = tree.insert([1, 2, 3, 4, 5])
        tree.mark_computed([sequence.node], [4])
        tree.insert([1, 2, 9])
        assert [(node.tokens.tolist(), node.computed) for node in tree.nodes()] == [
            ([1, 2], 2),
            ([3, 4, 5], 2),
            ([9], 0),
        ]
        tree.insert([1, 2, 3, 4, 5, 6])
        assert [(node.tokens.tolist(), computed, length) for node, computed, length in uncomputed(tree)] == [
            ([3, 4, 5], 2, 3),
            ([6], 0, 1),
            ([9], 0, 1),
        ]

    def test_a_merge_adds_it(self) -> None:
        tree = PrefixTree(8, page_size=4)
        sequence, other = tree.insert([1, 2, 3, 4, 5]), tree.insert([1, 2, 9])
        tree.mark_computed(tree.nodes()[:2], [2, 1])
        tree.release(other)
        assert (sequence.node.length, sequence.node.computed) == (5, 3)
        check_tree(tree)

    def test_only_tokens_of_living_nodes_can_be_computed(self) -> None:
        tree = PrefixTree(8)
        sequence, gone = tree.insert([1, 2]), tree.insert([3])
        dead = gone.node
        tree.release(gone)
        for nodes, computed in (([sequence.node], [3]), ([sequence.node], [-1]), ([sequence.node, dead], [1, 1])):
            with pytest.raises(ValueError, match="cannot mark"):
                tree.mark_computed(nodes, computed)
        with pytest.raises(ValueError, match="2 counts for 1 nodes"):
            tree.mark_computed([sequence.node], [1, 1])
        assert sequence.node.computed == 0


class TestForget:
    def test_only_sequences_stay_and_none_of_their_tokens_has_kv(self) -> None:
        tree = PrefixTree(16, page_size=4)
        whole, prefix, beside = (tree.insert(tokens) for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3], [1, 2, 9]))
        tree.mark_computed(tree.nodes(), [node.length for node in tree.nodes()])
        tree.exclude_from_snapshot(whole)
        for sequence in (prefix, beside):
            tree.retain(sequence)
        tree.invalidate_kv()
        check_tree(tree)
        assert tree.num_cached == 0 and tree.match([1, 2, 9]).length == 2
        assert whole.tokens().tolist() == [1, 2, 3, 4, 5, 6] and whole.node.computed == 0
        assert structure_of(whole) == [6], "splits for what was kept are undone"
        assert tree.allocator.free == 14

    def test_what_nodes_hold_later_is_not_what_they_held(self) -> None:
        """What was made of a node's KV, such as K and V of latents, is known by the number of its content."""
        tree = PrefixTree(16, page_size=4)
        sequence = tree.insert([1, 2, 3, 4, 5])
        tree.mark_computed([sequence.node], [5])
        before = tree.snapshot().content
        tree.invalidate_kv()
        tree.mark_computed([sequence.node], [5])
        assert before is not None and not np.isin(before, tree.snapshot().content).any()

    def test_what_is_kept_later_is_what_was_computed_since(self) -> None:
        tree = PrefixTree(16, page_size=4)
        sequence = tree.insert([1, 2, 3, 4, 5])
        tree.mark_computed([sequence.node], [5])
        tree.invalidate_kv()
        assert tree.retain(sequence) is None
        assert tree.allocator.free == 16
        check_tree(tree)
