"""Token prefixes as a trie in flat arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkit.kv.prefixes.trie import PrefixTrie, trie_of

PREFIXES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)


def test_nodes_part_where_prefixes_do_and_end_where_they_end():
    trie, sources = trie_of([[5, 6, 7, 8], [5, 6, 9], [5, 6], [1], [300, 2]])
    assert trie.parents.tolist() == [-1, -1, 1, 1, -1]
    assert trie.lengths.tolist() == [1, 2, 2, 1, 2]
    assert trie.tokens.tolist() == [1, 5, 6, 7, 8, 9, 300, 2]
    assert trie.starts.tolist() == [0, 0, 2, 2, 0]
    assert trie.leaves().tolist() == [0, 2, 3, 4]
    assert trie.span(2) == (3, 5)
    assert trie.prefix(2).tolist() == [5, 6, 7, 8]
    assert sources[2] == 0 and sources[3] == 1


@given(PREFIXES)
def test_the_nodes_are_those_of_a_radix_trie(prefixes):
    trie, sources = trie_of(prefixes)
    ends = {tuple(trie.prefix(node).tolist()) for node in range(len(trie))}
    given = {tuple(prefix) for prefix in prefixes}
    starts = {prefix[:end] for prefix in given for end in range(1, len(prefix) + 1)}
    forks = {start for start in starts if len({other for other in starts if other[:-1] == start}) > 1}
    assert ends == given | forks
    assert len(trie.tokens) == len(starts), "each shared token is there once"
    for node, source in enumerate(sources):
        start, length = trie.starts[node], trie.lengths[node]
        assert prefixes[source][start : start + length] == trie.tokens[slice(*trie.span(node))].tolist()
        assert trie.prefix(node).tolist() == prefixes[source][: start + length]


def test_long_prefixes_in_a_deep_trie():
    tokens = np.arange(5000)
    trie, _ = trie_of([tokens[:end] for end in range(1, 5001)])
    assert len(trie) == len(trie.tokens) == 5000
    assert np.array_equal(trie.prefix(4999), tokens)


@pytest.mark.parametrize(
    ("prefixes", "error", "reason"),
    [
        ([], ValueError, "at least one prefix"),
        ([[1], []], ValueError, "must not be empty"),
        ([[-1]], ValueError, "must not be negative"),
        ([[0.5]], TypeError, "must be integers"),
    ],
)
def test_prefixes_that_are_none(prefixes, error, reason):
    with pytest.raises(error, match=reason):
        trie_of(prefixes)


@pytest.mark.parametrize(
    ("parents", "lengths", "tokens", "reason"),
    [
        ([-1], [1, 1], [3, 4], "got 1 and 2"),
        ([-1, 0], [1, 0], [3], "node 1 has 0 tokens"),
        ([-1, 0], [2, -1], [3], "node 0 has 2 tokens"),
        ([-1], [2**62], [3], "tokens, of 1 in all"),
        ([-1, 0], [1, 1], [3, 4, 5], "the nodes have 2 tokens, but there are 3"),
        ([-1, 1], [1, 1], [3, 4], "node 1 has parent 1"),
        ([1, -1], [1, 1], [3, 4], "node 0 has parent 1"),
        ([-2], [1], [3], "node 0 has parent -2"),
        ([-(2**63)], [1], [3], "node 0 has parent"),
        ([-1], [1], [-3], "token -3 at 0"),
        ([-1], [1], [2**31], "token 2147483648 at 0"),
        ([-1, -1], [1, 1], [3, 3], "nodes 0 and 1 have the same parent and the same first token, 3"),
        ([-1, 0, 0], [1, 2, 1], [3, 4, 5, 4], "nodes 1 and 2 have the same parent"),
        ([[-1]], [1], [3], "parents must be one-dimensional"),
        ([-1.0], [1], [3], "parents must be one-dimensional integers, got float64"),
    ],
)
def test_arrays_that_are_no_trie(parents, lengths, tokens, reason):
    with pytest.raises(ValueError, match=reason):
        PrefixTrie(np.array(parents), np.array(lengths), np.array(tokens))


def test_a_trie_has_nodes():
    none = np.array([], np.int64)
    with pytest.raises(ValueError, match="a trie needs nodes"):
        PrefixTrie(none, none, none)
