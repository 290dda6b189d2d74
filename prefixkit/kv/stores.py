"""The KV stores of one model, shared by sessions and ``generate()`` or not, within one memory limit."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prefixkit.agreement import ALONE, Agreement, ProcessesDiffer, all_or_none
from prefixkit.attention.spans import LooksAhead
from prefixkit.kv.device_memory import free_for
from prefixkit.kv.held import Held
from prefixkit.kv.kv_pool import KVPool, KVPoolTooLarge, KVSpec
from prefixkit.kv.limits import IDLE_SHARE, LIMIT_SHARE, DoesNotFit, check_rows
from prefixkit.kv.store import KVStore
from prefixkit.tree.arrays import Ints

log = logging.getLogger("prefixkit")


@dataclass(frozen=True)
class StoreKind:
    """What calls must have in common to use each other's KV.

    Attributes:
        spec: What is cached for a token.
        layers: A description of the attention layers, and of the modules that compute them.
        page_size: Tokens per page.
        eviction: The policy of the prefix cache.
        compiled: Whether layers run through torch.compile, which rounds differently.
        outer: What runs around the model, such as the hooks of a wrapper.
        looks_ahead: The variants of layers under which tokens see later ones.
        held: Which tokens samples have to hold; None: all.
    """

    spec: KVSpec
    layers: Hashable
    page_size: int = 16
    eviction: str = "lru"
    compiled: bool = False
    outer: Hashable = ()
    looks_ahead: tuple[LooksAhead, ...] = ()
    held: Held | None = None


@dataclass(eq=False)
class _Shared:
    """What is known of a shared store: its kind, the epoch of its KV, its borrower, and the sessions that hold it."""

    kind: StoreKind
    epoch: int
    borrower: weakref.ref[Any] | None = None
    holders: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


class ModelStores:
    """The KV stores of one model.

    A shared store is *lent* to one call at a time; another call of its kind gets another store meanwhile.  It lives
    while a session holds it, while it is lent, and while it is *idle* until the next call of ``generate()``.
    A further store is refused if all stores together would take more than ``LIMIT_SHARE`` of the memory that was free
    when the first of them was made.  The first may be as large as a ``kv_budget`` asks for.

    A copied or unpickled model starts without stores.

    If several processes share the model, each has the same stores: they agree on sizes and on which stores to make.

    Attributes:
        epoch: How often :meth:`drop` was called: KV of an earlier epoch is not used.
        agreement: The agreement of the processes that share the model.
    """

    agreement: Agreement = ALONE

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._all: weakref.WeakSet[KVStore] = weakref.WeakSet()
        self._shared: weakref.WeakKeyDictionary[KVStore, _Shared] = weakref.WeakKeyDictionary()
        self._idle: set[KVStore] = set()  # stores that no session holds and no call uses
        self._limit = 0
        self.epoch = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelStores, ()

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Bytes that all stores take when full."""
        return sum(store.pool.bytes for store in [*self._all])

    def free(self, spec: KVSpec, beside: int = 0) -> int:
        """Bytes that new stores may take, and ``beside`` bytes of each device (:func:`free_for`), within the limit of
        all stores; the minimum over all processes.
        """
        with self._lock:
            free = free_for(spec.shares, beside)
            if not self._all:
                self._limit = int(LIMIT_SHARE * free)
            return self.agreement.least(max(0, min(free, self._limit - self.bytes)))

    def make(self, kind: StoreKind, pages: int) -> KVStore:
        """Make a store that is not shared.

        Raises:
            DoesNotFit: the model's stores would exceed their limit.
            KVPoolTooLarge: the device has too little free memory.
        """
        with self._lock:
            self._align()
            need = pages * kind.page_size * kind.spec.bytes_per_token
            if need > self.free(kind.spec):
                self._idle.clear()
            if need > (free := self.free(kind.spec)) and self._all:
                raise DoesNotFit(
                    f"a KV store of {need / 2**30:.2f} GiB is above what the other stores of the model leave "
                    f"({free / 2**30:.2f} GiB); lower kv_budget, or close a session"
                )
            pool = all_or_none(self.agreement, KVPoolTooLarge, lambda: KVPool(kind.spec, pages, kind.page_size))
            store = KVStore(pool, kind.eviction, kind.looks_ahead, kind.held, self.agreement)
            store.free = partial(self.free, kind.spec)
            self._all.add(store)
            return store

    def grow(self, store: KVStore, pages: int) -> None:
        """Add pages to a store.

        Raises:
            DoesNotFit: sessions hold the store, and they set its size; or memory does not hold the old and the larger
                store together.  Nothing has changed.
        """
        with self._lock:
            pool, free = store.pool, self.free(store.pool.spec)
            if (shared := self._shared.get(store)) is not None and shared.holders:
                raise DoesNotFit("the KV store of the model's sessions is full")
            total = (pool.num_pages + pages) * pool.page_size
            check_rows(pool.spec, total, free)
            log.info("KV store: %d tokens become %d", pool.num_pages * pool.page_size, total)
            store.grow(pages)

    # -- sharing -------------------------------------------------------------------------------------------------------

    def hold(self, kind: StoreKind, holder: object, size: Callable[[int], int]) -> KVStore:
        """The shared store of a kind, which the holder holds until it is garbage collected or :meth:`release_holder`.

        ``size``: maps free bytes to the store's number of pages; not called if another session holds the store.

        Raises:
            ValueError: ``size`` raised it; or memory is too small.
        """
        with self._lock:
            self._align()
            store = self._to_hold(kind, size)
            if store is None:
                self._drop_idle(kind)
                store = self._make_shared(kind, size(self.free(kind.spec)))
            self._shared[store].holders.add(holder)
            self._idle.discard(store)
            return store

    def _to_hold(self, kind: StoreKind, size: Callable[[int], int]) -> KVStore | None:
        """The store of a kind that a session holds already; else the largest that no call uses, grown to ``size``."""
        found = [store for store in self._of_kind(kind) if self._shared[store].holders or not self._lent(store)]
        if not found:
            return None
        store = max(found, key=lambda store: (bool(self._shared[store].holders), store.pool.num_pages))
        if not self._shared[store].holders:
            pages = size(self.free(kind.spec) + store.pool.bytes)
            try:
                if pages > store.pool.num_pages:
                    store.grow(pages - store.pool.num_pages)
            except KVPoolTooLarge:  # the old pages and the larger copy do not fit together
                return None
        return store

    def release_holder(self, holder: object) -> None:
        """Note that a session no longer holds a store."""
        with self._lock:
            for shared in self._shared.values():
                shared.holders.discard(holder)

    def lend(self, store: KVStore, borrower: object) -> bool:
        """Lend a shared store to a call; False if another call uses the store and cannot leave it."""
        with self._lock:
            self._align()
            if store not in self._shared or (self._lent(store) and not self._vacated(store)):
                return False
            self._lend(store, borrower)
            return True

    def borrow(self, kind: StoreKind, borrower: object, pages: int, prompts: Sequence[Ints] = ()) -> KVStore:
        """Lend a store with ``pages`` unpinned pages: the one that knows the longest prompt prefix, or a new one.

        If the ``borrower`` is garbage collected without :meth:`return_`, the store gets a new tree.

        Raises:
            DoesNotFit: no store has enough pages, and memory does not hold another one.
        """
        with self._lock:
            self._align()
            in_use = any(map(self._lent, self._of_kind(kind)))
            store = self._with_room(kind, pages, prompts)
            if store is None:
                self._drop_idle(kind)  # stores that are too small make room
                check_rows(kind.spec, pages * kind.page_size, self.free(kind.spec))
                store = self._make_shared(kind, pages)
            self._lend(store, borrower)
            if in_use:
                tokens = store.pool.num_pages * kind.page_size
                log.info("the model's KV store is in use: a call runs in another one, for %d tokens", tokens)
            return store

    def _with_room(self, kind: StoreKind, pages: int, prompts: Sequence[Ints]) -> KVStore | None:
        """Of the stores that have or can grow to enough pages, the one that knows the longest prompt prefix."""
        found = [store for store in self._of_kind(kind) if not self._lent(store)]
        found.sort(key=lambda store: (store.tree.longest_match(prompts), store.pool.num_pages), reverse=True)
        for store in found:
            try:
                if (lacking := pages - store.budget().pages) > 0:
                    self.grow(store, lacking)
            except (DoesNotFit, KVPoolTooLarge):
                continue
            return store
        return None

    def reclaim(self, borrower: object) -> None:
        """End the loan of an interrupted borrower; the store gets a new tree, as the old one may be half changed."""
        with self._lock:
            for store, shared in self._shared.items():
                if shared.borrower is not None and shared.borrower() is borrower:
                    store.restart()
                    shared.borrower = None

    def return_(self, store: KVStore, retain: bool = True) -> None:
        """End a loan; an idle store stays if ``retain`` is true, no session holds it, and it is small enough."""
        with self._lock:
            if (shared := self._shared.get(store)) is None:
                return
            shared.borrower = None
            if shared.epoch != self.epoch:
                shared.epoch, store.version = self.epoch, None
                retain = False
            if not retain or shared.holders:
                return
            spec = store.pool.spec
            small = spec.device.type == "cuda" or store.pool.bytes <= IDLE_SHARE * free_for(spec.shares)
            if small and self._idle.isdisjoint(self._of_kind(shared.kind)):
                self._idle.add(store)

    def known(self, kind: StoreKind, tokens: Ints) -> int:
        """How many tokens of a prompt, from the first, some store that :meth:`borrow` may lend holds."""
        with self._lock:
            free = (store for store in self._of_kind(kind) if not self._lent(store))
            return max((store.tree.match(tokens).length for store in free), default=0)

    def __len__(self) -> int:
        """The number of shared stores that no call uses."""
        with self._lock:
            return sum(not self._lent(store) for store in [*self._shared])

    def drop(self) -> None:
        """Free idle stores; later calls use no KV from before."""
        with self._lock:
            self.epoch += 1
            self._idle.clear()
            for store, shared in self._shared.items():
                if not self._lent(store):
                    shared.epoch, store.version = self.epoch, None

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _align(self) -> None:
        """Drop idle stores if the processes' stores differ: Python collects cycles at different times in each.

        Raises:
            ProcessesDiffer: the stores differ even then.
        """
        if self.agreement.processes == 1:
            return
        for last in (False, True):
            try:
                return self.agreement.check("KV stores of it", self._histories)
            except ProcessesDiffer:
                if last:
                    raise
                self._idle.clear()
                gc.collect()

    def _histories(self) -> list[tuple[object, ...]]:
        """The history of each store, in an order that is the same in all processes."""
        found = [(store, self._shared.get(store)) for store in [*self._all]]
        return sorted(
            (*store.history, shared is not None and self._lent(store), bool(shared and shared.holders))
            for store, shared in found
        )

    def _of_kind(self, kind: StoreKind) -> list[KVStore]:
        return [store for store, shared in self._shared.items() if shared.kind == kind]

    def _drop_idle(self, kind: StoreKind) -> None:
        self._idle.difference_update(self._of_kind(kind))

    def _make_shared(self, kind: StoreKind, pages: int) -> KVStore:
        store = self.make(kind, pages)
        self._shared[store] = _Shared(kind, self.epoch)
        return store

    def _lend(self, store: KVStore, borrower: object) -> None:
        self._shared[store].borrower = weakref.ref(borrower)
        self._idle.discard(store)

    def _lent(self, store: KVStore) -> bool:
        """Whether a call uses a store; a borrower that is gone without :meth:`return_` left sequences in its tree."""
        shared = self._shared[store]
        if shared.borrower is not None and shared.borrower() is None:
            shared.borrower = None
            store.restart()
        return shared.borrower is not None

    def _vacated(self, store: KVStore) -> bool:
        """Ask the borrower to leave the store for another one, which it can between two calls; whether it did."""
        borrower = self._shared[store].borrower
        leave: Callable[[], bool] | None = None if borrower is None else getattr(borrower(), "vacate", None)
        return leave is not None and leave() and not self._lent(store)
