"""What the prefix cache gives up where pages are needed, and how the tree looks afterwards."""

from __future__ import annotations

import numpy as np

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import PrefixTree
from prefixkit.tree.eviction import PrefixCache


def cache_of(*prompts: list[int], num_pages: int = 32, page_size: int = 1) -> PrefixCache:
    """A cache that keeps these prompts, the first one found least recently."""
    cache = PrefixCache(PrefixTree(num_pages, page_size))
    for tokens in prompts:
        sequence = cache.tree.insert(tokens)
        path = sequence.node
        while path.parent is not None:
            cache.tree.mark_computed([path], [path.length])
            path = path.parent
        cache.retain(sequence)
    return cache


def test_the_prompt_found_least_recently_goes_first() -> None:
    cache = cache_of([1, 2, 3], [4, 5, 6], num_pages=6)
    again = cache.tree.insert([1, 2, 3])
    cache.record_hit(again)
    cache.retain(again)
    assert cache.free_pages(3)
    assert cache.tree.match([1, 2, 3]).length == 3
    assert cache.tree.match([4, 5, 6]).length == 0


def test_nothing_is_evicted_for_more_pages_than_that_would_free() -> None:
    cache = cache_of([1, 2, 3], [4, 5, 6], num_pages=8)
    held = cache.tree.insert([7, 8])
    assert not cache.free_pages_or_none(7)
    assert cache.tree.match([1, 2, 3]).length == cache.tree.match([4, 5, 6]).length == 3
    assert cache.free_pages_or_none(6)
    assert cache.tree.match([1]).length == cache.tree.match([4]).length == 0
    assert held.length == 2


def test_nothing_is_evicted_for_pages_that_a_pinned_prompt_holds() -> None:
    """Snapshots leave it out, and yet it stays."""
    cache = cache_of([1, 2, 3], [4, 5, 6], num_pages=8)
    tree = cache.tree
    pinned = tree.insert([1, 2, 3])
    tree.exclude_from_snapshot(pinned)
    assert not cache.free_pages_or_none(6)
    assert tree.match([4, 5, 6]).length == 3
    assert cache.free_pages_or_none(5)
    assert tree.match([1, 2, 3]).length == 3
    assert tree.match([4]).length == 0


def test_nothing_is_evicted_for_pages_below_a_pin_guard() -> None:
    cache = cache_of([1, 2, 3], [4, 5, 6], num_pages=8)
    with cache.pinned(cache.tree.match([1, 2, 3]).node):
        assert not cache.free_pages_or_none(6)
        assert cache.tree.match([4, 5, 6]).length == 3
    assert cache.free_pages_or_none(6)


def test_a_node_that_is_protected_while_its_child_goes_is_one_with_its_other_child_afterwards() -> None:
    cache = cache_of([1, 2, 3, 4], [1, 2, 9], num_pages=5)
    tree = cache.tree
    shared = tree.match([1, 2, 7]).node
    with cache.pinned(shared):
        assert cache.free_pages(2)
        assert tree.match([1, 2]).length == 2
    check_tree(tree)
    (node,) = tree.root.children
    np.testing.assert_array_equal(node.tokens, [1, 2, 9])
