"""One store of KV: pages, the tree of the tokens whose KV they hold, and what is retained of earlier calls."""

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
from prefixkit.kv.held import Held
from prefixkit.kv.kv_pool import KVPool, KVPoolTooLarge, free_memory
from prefixkit.kv.limits import STATE_SHARE
from prefixkit.tree.arrays import Ints
from prefixkit.tree.eviction import POLICIES, PrefixCache
from prefixkit.tree.node import Node
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import PrefixTree, Sequence
from prefixkit.tree.spelling import Spelling
from prefixkit.tree.state_slots import StateSlots, name

log = logging.getLogger("prefixkit")

# A state less than this many tokens after another saves little.
_FEWEST_A_CHECKPOINT = 256


class SpanTooLong(ValueError):
    """Under a mask that looks ahead, more tokens see one another than one step computes."""


class KVStore:
    """Pages of KV, the prefix tree over them, and the prefix cache: what one call computed the next one finds.

    One call uses it at a time.  The prefix cache evicts by ``eviction``, a key of :data:`POLICIES`; ``looks_ahead`` has
    the variants under which tokens see later ones, ``held`` what samples have to hold, None for everything.  Where
    several processes share the model, each has its heads' KV in such a store, and ``agreement`` is theirs.

    Attributes:
        pool: The pages.
        tree: The tokens whose KV they hold.
        cache: What is retained in the tree until its pages are needed.
        version: Of the weights that the KV is of; None: not known.
        runners: What runs steps over the pool, by what runs in them; CUDA graphs hold its addresses.
        notes: What callers keep with the store, by what it is.
        most_state_bytes: What states may take of a ``kv_budget``; None without one: half of what :attr:`free` says.
        free: Bytes that the store may take besides.
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
        self.free: Callable[[], int] = partial(free_memory, pool.spec.device)
        self.restart()

    def __repr__(self) -> str:
        free, pool = self.tree.allocator.free, self.pool
        return f"KVStore({free} of {pool.num_pages} pages of {pool.page_size} tokens free, {pool.spec})"

    def restart(self) -> None:
        """Make a new tree: an interrupt may have left this one half changed.  Sequences of before, and pins, end."""
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
        """Tokens of a text after each of which its state stays, for calls that part there unforeseen.

        At this distance states take no more bytes than the KV of the same text.
        """
        return max(_FEWEST_A_CHECKPOINT, -(-self.pool.spec.bytes_per_state // self.pool.spec.bytes_per_token))

    @property
    def history(self) -> tuple[int, ...]:
        """Counts that stores differ in which calls have used in other ways."""
        cache = self.cache
        used = cache.tokens_queried, cache.tokens_hit, cache.tokens_evicted
        return self.pool.num_pages, self.tree.allocator.free, *used, len(self.pins)

    # -- admission -----------------------------------------------------------------------------------------------------

    def fits(self, contexts: Iterable[Ints], lookahead: int = 0) -> bool:
        """Whether there are pages for these sequences, and ``lookahead`` more; what nothing needs is evicted for it.

        A sequence that the tree holds in part takes pages for its other tokens alone.
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
        """Insert a sequence where its pages fit beside ``lookahead`` more; None where they do not.

        ``alone``: nothing else runs.  Then what is in the way is what the cache retains, and the slots that are lost at
        the ends of its nodes: it is cleared, and the sequence inserted.
        """
        enough = pages_for(len(tokens), self.tree.page_size) + lookahead <= self.tree.allocator.free
        if not (enough or self.fits([tokens], lookahead)):
            if not alone:
                return None
            self.cache.clear()
        # Eviction may have merged what was found with nodes above it, so it is looked for again.
        sequence = self.tree.insert(tokens)
        self.cache.record_hit(sequence)
        return sequence

    def touch(self, contexts: Iterable[Ints]) -> None:
        """Let what the tree holds of these sequences, which a call admits in turns, be evicted after all else.

        Else a sequence that is admitted early may take the KV of one that comes later, and leave what nothing needs.
        """
        for tokens in contexts if self.tree.num_cached else ():
            self.cache.touch(self.tree.match(tokens).node)

    def check_spans(self, texts: Ordered[tuple[str, int]], chunk: int) -> None:
        """Raise SpanTooLong where a step of ``chunk`` tokens cannot compute a span of a text as a whole.

        ``texts``: the name and the length of each.
        """
        if (spelling := self.tree.spelling) is None:
            return
        spelling.longest(max((length for _, length in texts), default=0))  # what it sees is known of all shorter ones
        for what, length in texts:
            if (longest := spelling.longest(length)) > chunk:
                raise SpanTooLong(
                    f"{what} has a span of {longest} tokens that see one another, which one step has to compute, and a "
                    f"step takes {chunk} prompt tokens at most; raise prefill_chunk to {longest}, or shorten it"
                )

    def budget(self) -> Budget:
        """What a call that starts now may take."""
        return Budget(self.tree, self.pool.spec.bytes_per_token, self.pins, bool(self.pool.spec.states), self.held)

    # -- what stays ----------------------------------------------------------------------------------------------------

    def retain(self, sequence: Sequence) -> None:
        """Drop a sequence, and retain the KV of its tokens until their pages are needed."""
        self.cache.retain(sequence)

    def pin(self, tokens: Ints) -> Sequence:
        """Hold the KV of tokens that were just computed until the sequence that this returns is released."""
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
        """Note which weights the next KV is of, and invalidate KV of others; whether there may have been some.

        Each process knows its part of the weights: where one of them has seen a change, there is one.
        """
        changed = not everywhere(self.agreement, self.version == version)
        if changed:
            if self._spans is not None:
                self._spans.clear()
            self.invalidate()
            self.version = version  # last: an interrupt before leaves it to the next call
        spelling = self.tree.spelling
        if spelling is not None and spelling.held > self.tree.allocator.num_pages * self.tree.page_size:
            spelling.retain(node.tokens for node in self.tree.every_node())
        return changed

    def invalidate(self) -> None:
        """The model computes something else from now on: no KV of before is used again."""
        self.cache.clear()
        self.tree.invalidate_kv()

    def read_state(self, node: Node) -> tuple[Tensor, ...]:
        """Host copies of the state after a node's computed tokens; none where there is none."""
        if node.state < 0:
            return ()
        return tuple(self.pool.states.read(np.array([node.state])))

    def write_state(self, node: Node, state: tuple[Tensor, ...]) -> None:
        """Give a node, whose tokens have KV as they had then, what :meth:`read_state` gave, where a slot is free."""
        states = self.tree.states
        if states is not None and state and node.state < 0:
            for slot in states.spare(1):
                self.pool.states.write(np.array([slot]), state)
                name(node, node.computed, slot)

    @property
    def state_bytes_allowed(self) -> int:
        """What states may take, those that there are included."""
        if self.most_state_bytes is not None:
            return self.most_state_bytes
        held = self.pool.states.bytes
        return held + int(STATE_SHARE * max(0, self.free() - held))

    def have_slots(self, wanted: int, least: int, remedy: str = "") -> None:
        """Have slots for ``wanted`` states beside those that nodes have, or as many as there is memory for.

        Args:
            wanted, least: States of sequences at once, as many as would be good and as must be.
            remedy: What lowers ``least``, for the message.

        Raises:
            KVBudgetTooSmall: there is no memory for ``least``; nothing has changed.
            KVPoolTooLarge: the device has not the memory that they may take; nothing has changed.
        """
        states, of_tree = self.pool.states, self.tree.states
        if of_tree is None or (wanted := wanted + of_tree.used) <= states.slots:
            return
        size, most = self.pool.spec.bytes_per_state, self.state_bytes_allowed
        # Each time twice as many: graphs hold the tensors of before.
        slots = max(states.slots, min(max(wanted, 2 * states.slots), most // size))
        if slots < least:
            raise self._too_small(least, most, remedy)
        if slots > states.slots:
            try:
                larger = all_or_none(self.agreement, RuntimeError, lambda: states.made(slots))
            except RuntimeError as error:  # torch's OutOfMemoryError is one too
                need, free = slots * size / 2**30, free_memory(states.device) / 2**30
                why = f"{slots} states take {need:.1f} GiB, which {states.device} cannot give ({free:.1f} GiB are free)"
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
        """Add pages: the pool is copied to a larger one, and its runners are dropped.

        Raises:
            KVPoolTooLarge: there is no memory for it beside the present one; nothing has changed.
        """
        total = self.pool.num_pages + pages
        self.pool = all_or_none(self.agreement, KVPoolTooLarge, lambda: self.pool.grown(total))
        self.runners.clear()
        self.tree.allocator.grow(pages)
