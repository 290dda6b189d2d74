"""TreeStats: what sharing saves."""

from __future__ import annotations

from prefixkit.tree import PrefixTree, TreeStats


def test_counts() -> None:
    tree = PrefixTree(16, page_size=4)
    prompt = tree.insert(range(10))
    forks = tree.fork(prompt, 3)
    tree.extend_each(forks, [1, 2, 3])
    assert tree.stats() == TreeStats(
        sequences=4, nodes=4, tokens_stored=13, tokens_unshared=43, pages_held=6, pages_total=16, max_depth=2
    )
    assert tree.stats().sharing == 43 / 13


def test_an_empty_tree_shares_nothing() -> None:
    stats = PrefixTree(3).stats()
    assert (stats.sequences, stats.max_depth, stats.pages_held, stats.sharing) == (0, 0, 0, 1.0)
