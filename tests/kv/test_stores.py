"""The stores of one model: who gets which, for how long, and how much memory they take."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from prefixkit.agreement import Alone, ProcessesDiffer
from prefixkit.kv.kv_pool import KVPoolTooLarge
from prefixkit.kv.limits import DoesNotFit
from prefixkit.kv.stores import ModelStores, StoreKind
from prefixkit.testing.kv_specs import spec_of_alike

SPEC = spec_of_alike(1, 1, 4)  # 32 bytes a token, 512 a page
KIND = StoreKind(SPEC, "layers")
FREE = 512 * 1000


class Borrower:
    """Somebody who calls; it may be weakly referred to."""


@pytest.fixture
def stores(free_memory: Callable[[int], None]) -> ModelStores:
    free_memory(FREE)
    return ModelStores()


def test_what_rests_is_lent_again_and_a_store_in_use_is_not(stores: ModelStores) -> None:
    one, other = Borrower(), Borrower()
    first = stores.borrow(KIND, one, 20)
    second = stores.borrow(KIND, other, 20)
    assert first is not second and len(stores) == 0
    stores.return_(first)
    assert len(stores) == 1 and stores.borrow(KIND, one, 10) is first


def test_stores_of_another_kind_are_not_lent(stores: ModelStores) -> None:
    borrower = Borrower()
    first = stores.borrow(KIND, borrower, 20)
    stores.return_(first)
    for change in ({"layers": "others"}, {"page_size": 4}, {"eviction": "lfu"}, {"compiled": True}, {"outer": (1,)}):
        assert stores.borrow(replace(KIND, **change), borrower, 5) is not first


def test_the_store_that_knows_most_of_the_prompt_is_lent(stores: ModelStores) -> None:
    borrowers = [Borrower() for _ in range(2)]
    prompt = np.arange(40, dtype=np.int32)
    held = [stores.hold(KIND, borrowers[0], lambda free: 50), stores.borrow(KIND, borrowers[1], 10)]
    assert held[0] is held[1]
    stores.return_(held[0])
    other = stores.make(KIND, 30)
    assert stores.known(KIND, prompt) == 0
    held[0].tree.insert(prompt)
    assert stores.known(KIND, prompt) == 40 and other.tree.match(prompt).length == 0


def test_a_borrower_that_goes_without_returning_leaves_an_empty_tree(stores: ModelStores) -> None:
    borrower, session = Borrower(), Borrower()
    store = stores.hold(KIND, session, lambda free: 50)
    assert stores.lend(store, borrower) and not stores.lend(store, session)
    store.tree.insert(np.arange(40, dtype=np.int32))
    del borrower
    gc.collect()
    assert stores.lend(store, session)
    assert store.tree.allocator.free == 50


def test_after_an_interrupt_what_was_lent_comes_back_with_an_empty_tree(stores: ModelStores) -> None:
    session = Borrower()
    store = stores.hold(KIND, session, lambda free: 50)
    assert stores.lend(store, session)
    store.tree.insert(np.arange(40, dtype=np.int32))
    stores.reclaim(session)
    assert store.tree.allocator.free == 50 and stores.lend(store, session)


def test_sessions_hold_one_store_which_goes_with_the_last_of_them(stores: ModelStores) -> None:
    sessions = [Borrower(), Borrower()]
    sizes: list[int] = []

    def size(free: int) -> int:
        sizes.append(free)
        return 60

    held = [stores.hold(KIND, session, size) for session in sessions]
    assert held[0] is held[1] and len(sizes) == 1
    stores.release_holder(sessions[0])
    held.clear()
    del sessions[0]
    gc.collect()
    assert stores.bytes == 0, "nobody refers to it"


def test_a_session_makes_what_rests_its_own_and_as_large_as_it_wants(stores: ModelStores) -> None:
    store = stores.borrow(KIND, borrower := Borrower(), 20)
    stores.return_(store)
    held = stores.hold(KIND, borrower, lambda free: 60)
    assert held is store and store.pool.num_pages == 60


def test_rows_get_a_larger_store_but_for_that_of_a_session(stores: ModelStores) -> None:
    borrower, session = Borrower(), Borrower()
    store = stores.borrow(KIND, borrower, 20)
    stores.return_(store)
    assert stores.borrow(KIND, borrower, 40) is store and store.pool.num_pages == 40
    stores.return_(store)
    held = stores.hold(KIND, session, lambda free: 60)
    other = stores.borrow(KIND, borrower, 70)
    assert other is not held and held.pool.num_pages == 60
    with pytest.raises(DoesNotFit, match="is full"):
        stores.lend(held, borrower)
        stores.grow(held, 1)


def test_all_stores_are_within_one_limit(stores: ModelStores) -> None:
    borrower = Borrower()
    made = [stores.make(KIND, 500)]
    assert stores.free(SPEC) == 450 * 512
    with pytest.raises(DoesNotFit, match="at most 50% of"):
        stores.borrow(KIND, borrower, 300)
    with pytest.raises(DoesNotFit, match="lower kv_budget, or close a session"):
        stores.make(KIND, 451)
    made.append(stores.make(KIND, 450))
    assert stores.free(SPEC) == 0
    made.clear()
    gc.collect()
    assert stores.free(SPEC) == 950 * 512


def test_a_large_store_does_not_rest_on_a_cpu(stores: ModelStores) -> None:
    store = stores.borrow(KIND, Borrower(), 101)
    stores.return_(store)
    del store
    gc.collect()
    assert stores.bytes == 0


def test_what_is_dropped_is_not_used_again(stores: ModelStores) -> None:
    borrower, session = Borrower(), Borrower()
    lent, held = stores.borrow(KIND, borrower, 20), stores.hold(KIND, session, lambda free: 60)
    lent.use_version(1)
    held.use_version(1)
    stores.drop()
    assert held.version is None
    stores.return_(lent)
    assert lent.version is None
    del lent
    gc.collect()
    assert stores.bytes == held.pool.bytes


def test_a_copy_of_a_model_has_none(stores: ModelStores) -> None:
    stores.return_(stores.borrow(KIND, Borrower(), 20))
    for other in (copy.deepcopy(stores), pickle.loads(pickle.dumps(stores))):
        assert len(other) == 0 and len(stores) == 1


class Beside(Alone):
    """One of two processes that share a model: the other has less memory, and says so where it differs."""

    processes = 2

    def __init__(self, least=None, differs=0):
        self.of_other, self.differs, self.checked = least, differs, []

    def least(self, number):
        return number if self.of_other is None else min(number, self.of_other)

    def check(self, what, value, remedy=""):
        self.checked.append(value())
        if self.differs:
            self.differs -= 1
            raise ProcessesDiffer(what)


def test_the_memory_that_is_free_is_the_least_of_all_processes(stores: ModelStores) -> None:
    stores.agreement = Beside(least=FREE // 4)
    assert stores.free(SPEC) == FREE // 4
    store = stores.hold(KIND, Borrower(), lambda free: free // 512)
    assert store.pool.num_pages == FREE // 4 // 512
    assert store.agreement is stores.agreement


def test_a_store_that_another_process_has_no_memory_for_is_made_by_none(stores: ModelStores) -> None:
    stores.agreement = Beside(least=0)
    with pytest.raises(KVPoolTooLarge, match="another process of the model has no memory"):
        stores.make(KIND, 1)
    assert stores.bytes == 0


def test_what_rests_goes_where_another_process_has_lost_it(stores: ModelStores) -> None:
    borrower, stores.agreement = Borrower(), Beside()
    store = stores.borrow(KIND, borrower, 20)
    stores.return_(store)
    first = weakref.ref(store)
    del store
    assert len(stores) == 1, "it rests"
    stores.agreement.differs = 1
    second = stores.borrow(KIND, borrower, 20)
    assert first() is None and second.pool.num_pages == 20
    assert stores.agreement.checked[-1] == [], "both have none by then"
    stores.agreement.differs = 2
    with pytest.raises(ProcessesDiffer):
        stores.borrow(KIND, borrower, 20)
