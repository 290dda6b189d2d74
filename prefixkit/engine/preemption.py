"""Preemption: what runs leaves the tree where the pool is full, and comes back, token for token, once there are pages.

The KV that it leaves behind stays in the prefix cache until its pages are needed, and is computed again then; or it is
copied to host memory and back, whichever takes less time (vLLM, section 4.5).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.agreement import everywhere
from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.runs.run_protocol import Run
from prefixkit.kv.store import KVStore
from prefixkit.tree.node import Node
from prefixkit.tree.radix import Sequence as TreeSequence

log = logging.getLogger("prefixkit")

# Until something was measured: what PCIe 4 copies, and a prompt of a model of some billion weights.
_BYTES_PER_SECOND, _TOKENS_PER_SECOND = 16e9, 10e3


@dataclass(eq=False)
class Rate:
    """How much was done in how much time."""

    amount: float
    seconds: float

    def add(self, amount: float, seconds: float) -> None:
        """Count something; what is long ago counts less."""
        self.amount, self.seconds = 0.9 * self.amount + amount, 0.9 * self.seconds + seconds

    def seconds_for(self, amount: float) -> float:
        return amount * self.seconds / self.amount if self.amount else 0.0


@dataclass(frozen=True, eq=False)
class SwappedKV:
    """KV of a sequence in host memory.

    Attributes:
        start: Position of its first token.
        kv: Of all sequences that were swapped with it, as :meth:`KVPool.read` gives it.
        places: Which of its tokens are the sequence's, in order.
        state: The state after them, of layers that keep one; none where there is none.
    """

    start: int
    kv: list[Tensor]
    places: NDArray[np.int64]
    state: tuple[Tensor, ...] = ()


class Preemption:
    """Takes runs out of the tree and brings them back.

    Args:
        store: Where their KV lives.
        policy: Swap or recompute, and how much host memory there is.

    Attributes:
        computing: Prompt tokens computed, and the time that took.
        swapped, recomputed: Runs that were preempted so far, by what became of their KV.
        bytes_swapped: KV copied to host memory.
    """

    def __init__(self, store: KVStore, policy: MemoryPolicy) -> None:
        self.store, self.policy = store, policy
        self.computing: Rate = store.notes.setdefault("rate of computing", Rate(_TOKENS_PER_SECOND, 1.0))
        self.copying: Rate = store.notes.setdefault("rate of copying", Rate(_BYTES_PER_SECOND, 1.0))
        self.swapped = self.recomputed = self.bytes_swapped = 0
        self._held: dict[Run, list[SwappedKV]] = {}

    # -- out -----------------------------------------------------------------------------------------------------------

    def preempt(self, runs: Iterable[Run]) -> None:
        """Take runs out of the tree, those of one request together.

        Where nothing else holds the end of their prompt, that goes to host memory with them: it may be evicted, and a
        sample's KV is of no use without its prompt's.
        """
        runs = list(runs)
        start = _first_own(runs)
        slots = {run: [_computed_slots(one, start) for one in run.sequences] for run in runs}
        every = np.concatenate([each for of in slots.values() for each in of])
        in_order, first = np.unique(every, return_index=True)
        own = every[np.sort(first)]  # one sequence after another: what comes back at once lies together
        place = np.argsort(np.argsort(first))
        sequences = sum(len(run.sequences) for run in runs)
        swap = self._swaps(len(own), sequences)
        if swap:
            kv = self.store.pool.host_parts(len(own))
            began = time.perf_counter()
            self.store.pool.read(own, kv)
            self.copying.add(len(own) * self.store.pool.spec.bytes_per_token, time.perf_counter() - began)
            spec = self.store.pool.spec
            self.bytes_swapped += len(own) * spec.bytes_per_token + sequences * spec.bytes_per_state
            for run, of in slots.items():
                places = [place[np.searchsorted(in_order, each)] for each in of]
                states = [self.store.read_state(one.node) for one in run.sequences]
                self._held[run] = [SwappedKV(start, kv, *of) for of in zip(places, states, strict=True)]
            self.swapped += len(runs)
        else:
            self.recomputed += len(runs)
        how = "its KV goes to host memory" if swap else "what is evicted of its KV is computed again"
        log.debug("preempted %d of prompt %d: %s", len(runs), runs[0].state.request.prompt_index, how)
        drop = self.store.tree.release if swap else self.store.retain
        for sequence in [one for run in runs for one in run.sequences]:
            drop(sequence)

    def _swaps(self, tokens: int, sequences: int) -> bool:
        """Whether the KV of this number of tokens, and states of sequences, are to go to host memory."""
        policy, spec = self.policy, self.store.pool.spec
        size = tokens * spec.bytes_per_token + sequences * spec.bytes_per_state
        every = [one for of in self._held.values() for one in of]
        held = sum({id(one.kv): sum(part.nbytes for part in one.kv) for one in every}.values())
        held += sum(part.nbytes for one in every for part in one.state)
        if not tokens or policy.preemption == "recompute" or held + size > int(policy.swap_space):
            return False
        if policy.preemption == "swap":
            return True
        faster = 2 * self.copying.seconds_for(size) < self.computing.seconds_for(tokens)
        return everywhere(self.store.agreement, faster)  # by the clock of each process

    # -- in ------------------------------------------------------------------------------------------------------------

    def resume(self, run: Run, lookahead: int, own_pages: int) -> bool:
        """Bring a run back into the tree, if there are pages for it beside ``lookahead`` for others; else only evict.

        Its last token is uncomputed then, and joins the tree once all before it has KV.  It may take ``own_pages``
        itself, if it shares none of its tokens.
        """
        store, tree = self.store, self.store.tree
        prompt = run.state.request.tokens
        chosen = [np.array(tokens[:-1], np.int32) for tokens in run.token_lists]
        own = [tree.keys_of(np.concatenate((prompt, tokens)), len(prompt)) for tokens in chosen]
        if not store.fits(own, lookahead + own_pages):
            return False
        run.resume([tree.insert(tokens) for tokens in own])
        # Sequences that found the same tokens in the tree take pages of their own from there on.
        if not store.cache.free_pages(lookahead + run.lookahead_pages(tree, self.policy.longest)):
            for sequence in run.sequences:
                tree.release(sequence)
            return False
        lost = False
        for sequence, swapped in zip(run.sequences, self._held.pop(run, [None] * len(own)), strict=True):
            computed = store.cache.record_hit(sequence)
            if swapped is not None and computed >= swapped.start:
                self._write(sequence, swapped, computed)
            lost |= swapped is not None and computed < swapped.start  # what it shared was evicted meanwhile
        self.swapped, self.recomputed = self.swapped - lost, self.recomputed + lost
        return True

    def free_swap_space(self) -> None:
        """Give the host memory back."""
        self._held.clear()

    def _write(self, sequence: TreeSequence, swapped: SwappedKV, computed: int) -> None:
        """Copy the KV of a sequence's tokens from ``computed`` on back into its slots, as far as it had some.

        A sample that was preempted while it was computed again had KV of its first tokens only.
        """
        end = swapped.start + len(swapped.places)
        if end <= computed:
            return self._write_state(sequence.node, swapped, end)
        places = swapped.places[computed - swapped.start :]
        began = time.perf_counter()
        self.store.pool.write(sequence.slots()[computed:end], swapped.kv, places)
        self.copying.add(len(places) * self.store.pool.spec.bytes_per_token, time.perf_counter() - began)
        node = sequence.node
        while node.parent is not None and node.start + node.length > computed:
            held = min(node.length, max(node.computed, end - node.start))
            self.store.tree.mark_computed([node], [held])
            node = node.parent
        self._write_state(sequence.node, swapped, end)

    def _write_state(self, node: Node, swapped: SwappedKV, end: int) -> None:
        if node.start + node.computed == end:
            self.store.write_state(node, swapped.state)


def _first_own(runs: Sequence[Run]) -> int:
    """Position of the first token that only these runs of one request hold, at most the first after its prompt."""
    prompt, own, ours = len(runs[0].state.request.tokens), set[Node](), set[int]()
    nodes = set[Node]()
    for sequence in (one for run in runs for one in run.sequences):
        ours.add(sequence.id)
        node: Node | None = sequence.node
        while node is not None and node not in nodes:
            nodes.add(node)
            node = node.parent
    first = prompt
    for node in sorted(nodes, key=lambda node: -node.start):
        if not node.pins and node.sequences.keys() <= ours and own.issuperset(node.children):
            own.add(node)
            first = min(first, node.start)
    return first


def _computed_slots(sequence: TreeSequence, begin: int) -> NDArray[np.int64]:
    """Slots of a sequence's tokens from position ``begin`` on, as far as they have KV."""
    node = sequence.node
    while node.parent is not None and not node.computed:
        node = node.parent
    return sequence.slots()[begin : node.start + node.computed]
