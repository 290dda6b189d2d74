"""A KV store: what comes in, what stays, and what a call may take of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkit.attention.spans import LooksAhead
from prefixkit.attention.variants import variant
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.kv.kv_pool import KVPool, KVPoolTooLarge
from prefixkit.kv.store import KVStore, SpanTooLong
from prefixkit.testing.integrity import check_tree
from prefixkit.testing.kv_specs import spec_of_alike


def store_of(num_pages: int, page_size: int = 4) -> KVStore:
    return KVStore(KVPool(spec_of_alike(1, 1, 1), num_pages, page_size))


def tokens(*ranges: tuple[int, int]) -> np.ndarray:
    return np.concatenate([np.arange(*one, dtype=np.int32) for one in ranges])


def computed(store: KVStore) -> None:
    nodes = store.tree.nodes()
    store.tree.mark_computed(nodes, [node.length for node in nodes])


def test_a_sequence_comes_in_where_its_own_tokens_fit_beside_the_lookahead() -> None:
    store = store_of(10)
    first = store.admit(tokens((0, 20)))
    assert first is not None and store.tree.allocator.free == 5
    assert store.admit(tokens((0, 16), (50, 62)), lookahead=3) is None
    assert store.tree.allocator.free == 5
    second = store.admit(tokens((0, 16), (50, 62)), lookahead=2)
    assert second is not None and store.tree.allocator.free == 2
    check_tree(store.tree)


def test_what_is_retained_makes_room_and_is_found_before() -> None:
    store = store_of(6)
    sequence = store.admit(tokens((0, 12)))
    assert sequence is not None
    computed(store)
    store.retain(sequence)
    again = store.admit(tokens((0, 12), (20, 24)))
    assert again is not None and again.computed == 12
    store.tree.release(again)
    other = store.admit(tokens((100, 124)))
    assert other is not None and store.tree.match(tokens((0, 12))).length == 0
    assert store.cache.tokens_queried == 12 + 16 + 24 and store.cache.tokens_hit == 12


def test_alone_a_sequence_comes_in_where_the_cache_is_in_the_way() -> None:
    """Prefixes that part in the midst of pages lie on more of them than their tokens need."""
    store = store_of(4)
    for last in range(3):
        sequence = store.admit(tokens((0, 5 + last), (50 + last, 51 + last)), alone=True)
        assert sequence is not None
        computed(store)
        store.retain(sequence)
    assert store.admit(tokens((0, 16)), alone=True) is not None
    check_tree(store.tree)


def test_pins_bound_what_a_call_may_take_but_for_what_begins_as_they_do() -> None:
    store = store_of(10)
    assert store.budget().pages == 10
    pin = store.pin(tokens((0, 20)))
    budget = store.budget()
    assert (budget.pages, budget.pinned_pages) == (5, 5)
    assert budget.pages_lacking(tokens((100, 120))) == 0
    assert budget.pages_lacking(tokens((100, 121))) == 6
    assert budget.pages_lacking(tokens((0, 20), (100, 120))) == 0
    with pytest.raises(KVBudgetTooSmall, match=r"a prompt needs KV for 24 tokens .* beside 5 pages .*, or shorten it"):
        raise budget.error("a prompt", 6, "shorten it")
    store.tree.release(pin)
    assert store.budget().pages == 10 and not store.pins


def test_kv_of_another_version_is_not_found() -> None:
    store = store_of(10)
    assert store.use_version(1)
    sequence = store.admit(tokens((0, 12)))
    assert sequence is not None
    computed(store)
    store.retain(sequence)
    pin = store.pin(tokens((0, 8)))
    assert not store.use_version(1)
    assert pin.computed == 8
    assert store.use_version(2)
    assert pin.computed == 0 and store.tree.match(tokens((0, 12))).length == 8


def test_a_store_that_grows_keeps_its_kv_and_drops_its_runners() -> None:
    store = store_of(4)
    store.pool.pages(0)[0][:] = 3
    store.runners["steps"] = object()
    sequence = store.admit(tokens((0, 12)))
    store.grow(6)
    assert store.pool.num_pages == store.tree.allocator.num_pages == 10 and not store.runners
    assert bool((store.pool.pages(0)[0][:4] == 3).all())
    assert sequence is not None and store.admit(tokens((50, 74))) is not None


def test_a_store_that_cannot_grow_is_as_before() -> None:
    store, runner = store_of(4), object()
    store.runners["steps"] = runner
    with pytest.raises(KVPoolTooLarge):
        store.grow(2**50)
    assert store.runners == {"steps": runner} and store.pool.num_pages == store.tree.allocator.num_pages == 4


def test_after_a_restart_nothing_is_known_and_pins_have_ended() -> None:
    store = store_of(4)
    pin = store.pin(tokens((0, 8)))
    store.restart()
    assert store.tree.allocator.free == 4 and not store.pins and pin.tree is not store.tree


def looking_ahead(num_pages: int, end: torch.Tensor) -> KVStore:
    """Where the tokens before a position, which may change, see one another."""
    mask = variant(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < end))
    return KVStore(KVPool(spec_of_alike(1, 1, 1), num_pages, 4), looks_ahead=[LooksAhead(mask, 1, torch.device("cpu"))])


def test_a_span_is_named_that_no_step_computes() -> None:
    store = looking_ahead(16, torch.tensor(9))
    store.check_spans([("a text", 8), ("another", 20)], 9)
    with pytest.raises(SpanTooLong, match=r"another has a span of 9 tokens .* a step takes 8 prompt tokens at most"):
        store.check_spans([("a text", 8), ("another", 20)], 8)


def test_a_pinned_text_is_found_as_the_tree_holds_it() -> None:
    store = looking_ahead(16, torch.tensor(9))
    store.pin(tokens((0, 20)))
    budget = store.budget()
    assert budget.tokens_pinned(tokens((0, 14), (40, 50))) == 14
    assert budget.tokens_pinned(tokens((0, 8), (40, 50))) == 0


def test_a_mask_that_has_changed_has_other_spans_from_the_next_version_on() -> None:
    end = torch.tensor(9)
    store = looking_ahead(16, end)
    store.use_version(1)
    before = store.tree.keys_of(tokens((0, 12)))
    end.fill_(5)
    assert store.tree.keys_of(tokens((0, 12))).tolist() == before.tolist()
    store.use_version(2)
    assert (store.tree.keys_of(tokens((0, 12))) < 1 << 30).tolist() == [False] * 5 + [True] * 7


def test_keys_of_spans_that_have_gone_are_given_again() -> None:
    store = looking_ahead(8, torch.tensor(9))
    store.use_version(1)
    held = store.pin(tokens((0, 12)))
    keys = held.keys().tolist()
    for first in range(100, 160, 10):
        store.tree.release(store.tree.insert(tokens((first, first + 10))))
    spelling = store.tree.spelling
    assert spelling is not None
    assert spelling.held == 7 * 9
    store.use_version(1)
    assert spelling.held == 9
    store.tree.insert(tokens((200, 210)))
    assert spelling.size == 7 * 9
    assert held.keys().tolist() == keys
    assert held.tokens().tolist() == [*range(12)]


def test_what_a_call_will_admit_is_evicted_after_what_is_newer() -> None:
    store = store_of(6)
    for first in (0, 100):
        sequence = store.admit(tokens((first, first + 12)))
        assert sequence is not None
        computed(store)
        store.retain(sequence)
    waiting = tokens((0, 12), (20, 24))
    store.touch([waiting])
    assert store.admit(tokens((200, 212))) is not None
    assert store.tree.match(waiting).length == 12 and store.tree.match(tokens((100, 112))).length == 0
