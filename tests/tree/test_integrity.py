"""check_tree() notices: each invariant broken by hand, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import PrefixTree, Sequence


def a_tree() -> tuple[PrefixTree, Sequence, Sequence]:
    tree = PrefixTree(16, page_size=4)
    a, b = tree.insert([1, 2, 3, 4, 5, 6]), tree.insert([1, 2, 7])
    check_tree(tree)
    return tree, a, b


def steal_slots(tree: PrefixTree, a: Sequence, b: Sequence) -> None:
    """b's leaf moves into the page of a's, whose counts are put right."""
    tree.allocator.share(int(a.node.pages[-1]))
    tree.allocator.release(b.node.pages)
    b.node.page_buffer = a.node.pages[-1:].copy()


def crowd_the_page(tree: PrefixTree, a: Sequence, b: Sequence) -> None:
    steal_slots(tree, a, b)
    b.node.first_slot = 3  # no slot twice, but a's leaf can no longer grow


def forget_to_merge(tree: PrefixTree, a: Sequence, b: Sequence) -> None:
    tree.allocator.release(b.node.pages)
    tree.nodes()[0].disown(b.node)


@pytest.mark.parametrize(
    ("breakage", "invariant"),
    [
        (lambda tree, a, b: tree.allocator.allocate(1), "every page counts its holders"),
        (lambda tree, a, b: setattr(tree.allocator, "_free", 3), "free pages and held pages"),
        (lambda tree, a, b: setattr(a.node, "start", 1), "starts where its parent ends"),
        (lambda tree, a, b: setattr(a.node, "parent", tree.root), "knows its parent"),
        (lambda tree, a, b: a.node.tokens.fill(9), "named after its first token"),
        (lambda tree, a, b: setattr(a.node, "computed", 1), "computed ancestors"),
        (lambda tree, a, b: setattr(tree.nodes()[0], "computed", 3), "0 <= computed <= length"),
        (lambda tree, a, b: a.node.sequences.clear(), "leads to a sequence"),
        (lambda tree, a, b: setattr(a, "node", b.node), "knows where it ends"),
        (lambda tree, a, b: setattr(a.node, "first_slot", 4), "begins in its first page"),
        (lambda tree, a, b: setattr(tree.root, "start", 1), "the root is empty|starts where"),
        (lambda tree, a, b: setattr(a.node, "first_slot", 0), "lies after it"),
        (lambda tree, a, b: a.node.link_after(None), "linked in the order of their slots"),
        (lambda tree, a, b: b.node.link_after(a.node), "not linked"),
        (steal_slots, "one owner"),
        (crowd_the_page, "linked in the order of their slots"),
        (forget_to_merge, "is merged"),
    ],
)
def test_a_broken_invariant_is_named(breakage: Callable[..., object], invariant: str) -> None:
    tree, a, b = a_tree()
    breakage(tree, a, b)
    with pytest.raises(AssertionError, match=invariant):
        check_tree(tree)


def test_two_owners_of_a_slot() -> None:
    tree = PrefixTree(4, page_size=4)
    a, b = tree.insert([1, 2]), tree.insert([3])
    tree.allocator.share(int(a.node.pages[0]))
    tree.allocator.release(b.node.pages)
    b.node.page_buffer = np.array(a.node.pages)
    with pytest.raises(AssertionError, match="one owner"):
        check_tree(tree)
