"""Texts whose tokens see later ones, in keys: equal spans have the same keys, and no other has any of them."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.tree.eviction import POLICIES, PrefixCache
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.spelling import FIRST_KEY, Keys, Spelling


def first_five(length):
    return np.array([[0, 5]] if length >= 5 else [], np.int64).reshape(-1, 2)


def array(*tokens):
    return np.array(tokens, np.int32)


def test_a_span_has_keys_of_its_own_and_other_tokens_are_their_ids():
    spelling = Spelling(first_five)
    one, same, other = (
        spelling.keys(array(*tokens)) for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8], range(9))
    )
    assert (one[:5] >= FIRST_KEY).all()
    assert one[5:].tolist() == [6]
    assert same.tolist() == [*one[:5].tolist(), 7, 8]
    assert not np.isin(other[:5], one).any()
    assert spelling.tokens(np.concatenate((other, one))).tolist() == [*range(9), 1, 2, 3, 4, 5, 6]
    assert spelling.left(one).tolist() == [4, 3, 2, 1, 0, 0]
    assert spelling.place(one[2:]).tolist() == [2, 3, 4, 0]


def test_a_text_may_be_shorter_than_what_follows_it():
    spelling = Spelling(first_five)
    assert spelling.keys(array(1, 2, 3, 4, 5), text=4).tolist() == [1, 2, 3, 4, 5]
    keys = spelling.keys(array(*range(8)), text=6)
    assert spelling.keys(keys) is keys, "keys are what they are"
    assert isinstance(keys[2:], Keys)


def test_keys_are_given_again_once_nothing_holds_them():
    spelling = Spelling(first_five)
    kept, lost = (spelling.keys(array(*range(first, first + 5))) for first in (0, 10))
    spelling.retain([kept[:2], array(7)])
    assert spelling.held == 5
    again = spelling.keys(array(*range(20, 25)))
    assert again.tolist() == lost.tolist()
    assert spelling.tokens(again).tolist() == [*range(20, 25)]
    assert spelling.keys(array(*range(5))).tolist() == kept.tolist()
    assert spelling.size == 10


def test_a_token_id_that_could_be_a_key_is_refused():
    with pytest.raises(ValueError, match="token ids must be below 1073741824"):
        Spelling(first_five).keys(array(1, FIRST_KEY))


def test_a_tree_shares_a_span_as_a_whole_or_not_at_all():
    tree = PrefixTree(64, page_size=4)
    tree.spelling = Spelling(first_five)
    whole = tree.insert([1, 2, 3, 4, 5, 6, 7])
    assert whole.tokens().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tree.match([1, 2, 3, 4, 5, 6, 9]).length == 6
    assert tree.match([1, 2, 3, 4, 6]).length == 0
    assert tree.match([1, 2, 3, 4]).length == 0, "a shorter text has another span, or none"
    assert tree.match(tree.keys_of([1, 2, 3, 4, 5, 6], text=3)).length == 0, "as if generated from its fourth token on"


def test_what_is_evicted_of_a_span_is_all_of_it():
    tree = PrefixTree(16, page_size=2)
    tree.spelling = Spelling(lambda length: np.array([[2, 9]], np.int64))
    cache = PrefixCache(tree, POLICIES["lru"])
    sequence = tree.insert(np.arange(12))
    tree.mark_computed([sequence.node], [12])
    cache.retain(sequence)
    assert cache.free_pages(12)
    assert tree.match(np.arange(12)).length == 2, "of pages that two tokens leave"
