"""How far tokens can be followed into a tree, and that following leaves no footprints."""

from __future__ import annotations

import numpy as np

from prefixkit.tree import PrefixTree
from tests.seeds import seeds
from tests.tree.model import fingerprint


def test_it_names_the_deepest_node_and_the_place_in_it() -> None:
    tree = PrefixTree(8, page_size=4)
    upper = tree.insert([1, 2, 3])
    lower = tree.insert([1, 2, 3, 4, 5])
    cases = [
        ([9], (tree.root, 0, 0)),
        ([1], (upper.node, 1, 1)),
        ([1, 2, 9], (upper.node, 2, 2)),
        ([1, 2, 3], (upper.node, 3, 3)),
        ([1, 2, 3, 9], (upper.node, 3, 3)),
        ([1, 2, 3, 4], (lower.node, 1, 4)),
        ([1, 2, 3, 4, 5, 6], (lower.node, 2, 5)),
    ]
    for tokens, expected in cases:
        found = tree.match(tokens)
        assert (found.node, found.offset, found.length) == expected, tokens


@seeds(10)
def test_it_finds_the_longest_prefix_and_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = PrefixTree(4096, page_size=4)
    held = [tuple(rng.integers(0, 3, rng.integers(1, 12)).tolist()) for _ in range(40)]
    for tokens in held:
        tree.insert(tokens)
    before = fingerprint(tree)
    prefixes = {tokens[:end] for tokens in held for end in range(len(tokens) + 1)}
    for _ in range(100):
        asked = tuple(rng.integers(0, 3, rng.integers(1, 14)).tolist())
        longest = max(end for end in range(len(asked) + 1) if asked[:end] in prefixes)
        found = tree.match(asked)
        assert found.length == longest
        assert found.node.start + found.offset == longest
    assert fingerprint(tree) == before
