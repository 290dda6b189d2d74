"""A KV store: pages, the tree of the tokens whose KV they hold, and the prefix cache of earlier calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Ordered
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from prefixkit.agreement import ALONE, Agreement, all_or_none, everywhere
from prefixkit.attention.spans import LooksAhead, Spans
from prefixkit.kv.budget import Budget, KVBudgetTooSmall
from prefixkit.kv.device_memory import free_for
from prefixkit.kv.held import Held
from prefixkit.kv.kv_pool import KVPool, KVPoolTooLarge
from prefixkit.kv.limits import STATE_SHARE
from prefixkit.tree.arrays import Ints
from prefixkit.tree.eviction import POLICIES, PrefixCache
from prefixkit.tree.node import Node
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import PrefixTree, Sequence
from prefixkit.tree.spelling import Spelling
from prefixkit.tree.state_slots import StateSlots, name

log = logging.getLogger("prefixkit")

# A state fewer than this many tokens after another one saves little.
_FEWEST_A_CHECKPOINT = 256


class SpanTooLong(ValueError):
    """Under a mask that looks ahead, a span has more tokens than one step computes."""


class KVStore:
    """Pages of KV, the prefix tree over them, and the prefix cache, in which a call finds what earlier ones computed.

    One call uses a store at a time.  ``eviction``, a key of :data:`POLICIES`, is the prefix cache's policy;
    ``looks_ahead`` has the variants under which tokens see later ones; ``held`` says which tokens samples have to hold,
    None for all.  If several processes share the model, each stores its heads' KV, and ``agreement`` is theirs.

    Attributes:
        pool: The pages.
        tree: The tokens whose KV they hold.
        cache: The prefix cache: KV retained in the tree until its pages are needed.
        version: The version of the weights that computed the KV; None: not known.
        runners: The runners of steps over the pool, by what they run; their CUDA graphs hold the pool's addresses.
        notes: Objects that callers keep with the store, by key.
        most_state_bytes: Bytes of a ``kv_budget`` that states may take; None without one: half of :attr:`free`.
        free: Returns the bytes that the store may take in addition.
    """

    tree: PrefixTree
    cache: PrefixCache

    def __init__(
        self,
        pool: KVPool,
        eviction: str = "lru",
        looks_ahead: Ordered[LooksAhead] = (),
        held: Held | None = None,
        agreement: Agreement = ALONE,
    ) -> None:
        self.pool, self.eviction, self.held, self.agreement = pool, eviction, held, agreement
        self._spans = Spans(looks_ahead) if looks_ahead else None
        self.version: Hashable = None
        self.runners: dict[Hashable, Any] = {}
        self.notes: dict[Hashable, Any] = {}
        self.most_state_bytes: int | None = None
        self.free: Callable[[], int] = partial(free_for, pool.spec.shares)
        self.restart()

    def __repr__(self) -> str:
        free, pool = self.tree.allocator.free, self.pool
        return f"KVStore({free} of {pool.num_pages} pages of {pool.page_size} tokens free, {pool.spec})"

    def restart(self) -> None:
        """Make a new tree: an interrupt may have left the old one half changed.  Old sequences and pins are dropped."""
        self.tree = PrefixTree(self.pool.num_pages, self.pool.page_size)
        if self.pool.spec.states:
            tree, slots = self.tree, self.pool.states.slots
            tree.states = StateSlots(tree.root, tree.included, slots, self.tokens_per_checkpoint)
        if self._spans is not None:
            self.tree.spelling = Spelling(self._spans)
        self.cache = PrefixCache(self.tree, POLICIES[self.eviction])
        self._pinned: list[Sequence] = []

    @property
    def tokens_per_checkpoint(self) -> int:
        """The distance between checkpoints of a text, in tokens, for later calls that diverge inside it.

        At this distance states take no more bytes than the text's KV.
        """
        return max(_FEWEST_A_CHECKPOINT, -(-self.pool.spec.bytes_per_state // self.pool.spec.bytes_per_token))

    @property
    def history(self) -> tuple[int, ...]:
        """Counts that differ between stores that calls have used differently."""
        cache = self.cache
        used = cache.tokens_queried, cache.tokens_hit, cache.tokens_evicted
        return self.pool.num_pages, self.tree.allocator.free, *used, len(self.pins)

    # -- admission -----------------------------------------------------------------------------------------------------

    def fits(self, contexts: Iterable[Ints], lookahead: int = 0) -> bool:
        """Whether pages for these sequences, and ``lookahead`` more, are free; evicts what no sequence needs if not.

        A sequence needs pages only for the tokens that the tree does not hold.
        """
        size = self.tree.page_size
        with ExitStack() as pinned:
            need = lookahead
            for tokens in contexts:
                found = self.tree.match(tokens)
                pinned.enter_context(self.cache.pinned(found.node))
                need += pages_for(len(tokens) - found.length, size)
            return self.cache.free_pages(need)

    def admit(self, tokens: Ints, lookahead: int = 0, *, alone: bool = False) -> Sequence | None:
        """Insert a sequence if its pages and ``lookahead`` more fit; None if they do not.

        ``alone``: nothing else runs.  Then only the prefix cache, and the slots lost at the ends of its nodes, take up
        pages: the cache is cleared, and the sequence inserted.
        """
        enough = pages_for(len(tokens), self.tree.page_size) + lookahead <= self.tree.allocator.free
        if not (enough or self.fits([tokens], lookahead)):
            if not alone:
                return None
            self.cache.clear()
        # Eviction may have merged the matched node with nodes above it, so `insert` matches again.
        sequence = self.tree.insert(tokens)
        self.cache.record_hit(sequence)
        return sequence

    def touch(self, contexts: Iterable[Ints]) -> None:
        """Mark the KV of these sequences, which a call will admit one by one, as used now, so that it is evicted last.

        Else admitting an early sequence may evict KV that a later one needs, before KV that no sequence needs.
        """
        for tokens in contexts if self.tree.num_cached else ():
            self.cache.touch(self.tree.match(tokens).node)

    def check_spans(self, texts: Ordered[tuple[str, int]], chunk: int) -> None:
        """Raise SpanTooLong if a step of ``chunk`` tokens cannot compute a span of a text as a whole.

        ``texts``: the name and the length of each.
        """
        if (spelling := self.tree.spelling) is None:
            return
        spelling.longest(max((length for _, length in texts), default=0))  # masks are evaluated once, for all lengths
        for what, length in texts:
            if (longest := spelling.longest(length)) > chunk:
                raise SpanTooLong(
                    f"{what} has a span of {longest} tokens that see one another, which one step has to compute, and a "
                    f"step takes {chunk} prompt tokens at most; raise prefill_chunk to {longest}, or shorten it"
                )

    def budget(self) -> Budget:
        """The pages that a call that starts now may use."""
        return Budget(self.tree, self.pool.spec.bytes_per_token, self.pins, bool(self.pool.spec.states), self.held)

    # -- retention ----------------------------------------------------------------------------------------------------

    def retain(self, sequence: Sequence) -> None:
        """Drop a sequence, and retain the KV of its tokens until the pages are needed."""
        self.cache.retain(sequence)

    def pin(self, tokens: Ints) -> Sequence:
        """Hold the KV of tokens that were just computed until the returned sequence is released."""
        sequence = self.tree.insert(tokens)
        self.tree.exclude_from_snapshot(sequence)
        self._pinned.append(sequence)
        return sequence

    @property
    def pins(self) -> list[Sequence]:
        """The pinned sequences that were not released."""
        self._pinned = [sequence for sequence in self._pinned if sequence.tree is not None]
        return self._pinned

    def use_version(self, version: Hashable) -> bool:
        """Set the version of the weights, and invalidate KV of any other version; True if the version has changed.

        Each process knows its part of the weights: a change that one process sees is a change for all.
        """
        changed = not everywhere(self.agreement, self.version == version)
        if changed:
            if self._spans is not None:
                self._spans.clear()
            self.invalidate()
            self.version = version  # set last: after an interrupt the next call invalidates again
        spelling = self.tree.spelling
        if spelling is not None and spelling.held > self.tree.allocator.num_pages * self.tree.page_size:
            spelling.retain(node.tokens for node in self.tree.every_node())
        return changed

    def invalidate(self) -> None:
        """Drop all KV, because the model has changed: no call uses KV from before."""
        self.cache.clear()
        self.tree.invalidate_kv()

    def read_state(self, node: Node) -> tuple[Tensor, ...]:
        """Host copies of the state after a node's computed tokens; empty if the node has no state."""
        if node.state < 0:
            return ()
        return tuple(self.pool.states.read(np.array([node.state])))

    def write_state(self, node: Node, state: tuple[Tensor, ...]) -> None:
        """Restore a node's state from :meth:`read_state` if a slot is free; its tokens must have KV again, as then."""
        states = self.tree.states
        if states is not None and state and node.state < 0:
            for slot in states.spare(1):
                self.pool.states.write(np.array([slot]), state)
                name(node, node.computed, slot)

    @property
    def state_bytes_allowed(self) -> int:
        """Bytes that states may take, including existing ones."""
        if self.most_state_bytes is not None:
            return self.most_state_bytes
        held = self.pool.states.bytes
        return held + int(STATE_SHARE * max(0, self.free() - held))

    def have_slots(self, wanted: int, least: int, remedy: str = "") -> None:
        """Make slots for ``wanted`` states besides those that nodes have, or for as many as memory allows.

        Args:
            wanted, least: How many states should, and must, fit at once.
            remedy: How to lower ``least``, for the message.

        Raises:
            KVBudgetTooSmall: the memory allowed for states does not hold ``least``; nothing has changed.
            KVPoolTooLarge: the device has less free memory than is allowed for states; nothing has changed.
        """
        states, of_tree = self.pool.states, self.tree.states
        if of_tree is None or (wanted := wanted + of_tree.used) <= states.slots:
            return
        size, most = self.pool.spec.bytes_per_state, self.state_bytes_allowed
        # Twice as many at least, if memory allows: growing drops the CUDA graphs, which hold the old tensors.
        slots = max(states.slots, min(max(wanted, 2 * states.slots), most // size))
        if slots < least:
            raise self._too_small(least, most, remedy)
        if slots > states.slots:
            try:
                larger = all_or_none(self.agreement, RuntimeError, lambda: states.made(slots))
            except RuntimeError as error:  # torch's OutOfMemoryError is a RuntimeError
                spec, need = self.pool.spec, slots * size / 2**30
                free = free_for(spec.shares) / 2**30
                why = f"{slots} states take {need:.1f} GiB, which {spec.places} cannot give ({free:.1f} GiB are free)"
                if states.slots < least:
                    raise KVPoolTooLarge(f"{why}; lower kv_budget") from error
                log.info("states: %s: %d are kept at once", why, states.slots)
                return
            states.grow(slots, larger)
            of_tree.grow(slots)
            for runner in self.runners.values():
                runner.drop_graphs()

    def _too_small(self, least: int, most: int, remedy: str) -> KVBudgetTooSmall:
        size = self.pool.spec.bytes_per_state
        need = least * size
        of, others = "of the memory that is free", ["free some memory"]
        if self.most_state_bytes is not None:
            whole = -(-need // STATE_SHARE)
            of, others = "of kv_budget", [f"raise kv_budget to {whole:.0f} bytes ({whole / 2**20:.2f} MiB) or more"]
        return KVBudgetTooSmall(
            f"layers that keep a state in place of KV need {least} states of {size} bytes at once, {need} bytes "
            f"({need / 2**20:.2f} MiB), and may take {most} bytes ({most / 2**20:.2f} MiB) {of}; "
            + " or ".join([*others, *([remedy] if remedy else [])])
        )

    def grow(self, pages: int) -> None:
        """Add pages: copy the pool to a larger one, and drop its runners.

        Raises:
            KVPoolTooLarge: the old and the larger pool do not fit the memory together; nothing has changed.
        """
        total = self.pool.num_pages + pages
        self.pool = all_or_none(self.agreement, KVPoolTooLarge, lambda: self.pool.grown(total))
        self.runners.clear()
        self.tree.allocator.grow(pages)
