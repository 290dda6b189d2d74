"""Preemption: runs leave the tree when the pool is full, and resume with the same tokens once there are pages.

The KV of a preempted run either stays in the prefix cache until its pages are needed, and is then recomputed, or is
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

# Assumed until measured: the bandwidth of PCIe 4, and the prefill rate of a model of some billion weights.
_BYTES_PER_SECOND, _TOKENS_PER_SECOND = 16e9, 10e3


@dataclass(eq=False)
class Rate:
    """An amount of work and the time that it took."""

    amount: float
    seconds: float

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement; older ones lose weight."""
        self.amount, self.seconds = 0.9 * self.amount + amount, 0.9 * self.seconds + seconds

    def seconds_for(self, amount: float) -> float:
        return amount * self.seconds / self.amount if self.amount else 0.0


@dataclass(frozen=True, eq=False)
class SwappedKV:
    """KV of a sequence in host memory.

    Attributes:
        start: Position of the first token whose KV is held.
        kv: KV of all sequences that were swapped together, as :meth:`KVPool.read` gives it.
        places: Indices in ``kv`` of the sequence's tokens, in order.
        state: The state after these tokens, of layers that keep a state; empty if there is none.
    """

    start: int
    kv: list[Tensor]
    places: NDArray[np.int64]
    state: tuple[Tensor, ...] = ()


class Preemption:
    """Removes runs from the tree and resumes them.

    Args:
        store: Holds the KV of the runs.
        policy: Swap or recompute, and the limit of host memory.

    Attributes:
        computing: The rate at which prompt tokens are computed.
        swapped, recomputed: Number of runs preempted so far whose KV was swapped, and whose KV is recomputed.
        bytes_swapped: KV bytes copied to host memory.
    """

    def __init__(self, store: KVStore, policy: MemoryPolicy) -> None:
        self.store, self.policy = store, policy
        self.computing: Rate = store.notes.setdefault("rate of computing", Rate(_TOKENS_PER_SECOND, 1.0))
        self.copying: Rate = store.notes.setdefault("rate of copying", Rate(_BYTES_PER_SECOND, 1.0))
        self.swapped = self.recomputed = self.bytes_swapped = 0
        self._held: dict[Run, list[SwappedKV]] = {}
        self._launched = Rate(0.0, 0.0)  # steps that the host has not waited for yet

    def count_step(self, tokens: int, seconds: float, waited: bool) -> None:
        """Count the host's time for ``tokens`` prompt tokens; what it did not wait for comes with the next wait."""
        launched = self._launched
        launched.amount, launched.seconds = launched.amount + tokens, launched.seconds + seconds
        if waited:
            if launched.amount:
                self.computing.add(launched.amount, launched.seconds)
            self._launched = Rate(0.0, 0.0)

    # -- out -----------------------------------------------------------------------------------------------------------

    def preempt(self, runs: Iterable[Run]) -> None:
        """Remove runs of one request from the tree together.

        If no other sequence holds the end of their prompt, its KV is swapped to host memory too: it may be evicted, and
        a sample's KV is useless without its prompt's KV.
        """
        runs = list(runs)
        start = _first_own(runs)
        slots = {run: [_computed_slots(one, start) for one in run.sequences] for run in runs}
        every = np.concatenate([each for of in slots.values() for each in of])
        in_order, first = np.unique(every, return_index=True)
        own = every[np.sort(first)]  # one sequence after another, so that KV copied back at once is contiguous
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
        """Whether to swap the KV of this number of tokens, and the states of the sequences, to host memory."""
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
        return everywhere(self.store.agreement, faster)  # each process measures its own times

    # -- in ------------------------------------------------------------------------------------------------------------

    def resume(self, run: Run, lookahead: int, own_pages: int) -> bool:
        """Resume a run if there are pages for it besides ``lookahead`` pages for other runs; else only evict.

        The last token of a resumed run is uncomputed, and joins the tree once all tokens before it have KV.  A run that
        shares none of its tokens may take ``own_pages`` pages.
        """
        store, tree = self.store, self.store.tree
        prompt = run.state.request.tokens
        chosen = [np.array(tokens[:-1], np.int32) for tokens in run.token_lists]
        own = [tree.keys_of(np.concatenate((prompt, tokens)), len(prompt)) for tokens in chosen]
        if not store.fits(own, lookahead + own_pages):
            return False
        run.resume([tree.insert(tokens) for tokens in own])
        # Sequences that found the same tokens in the tree take separate pages after these tokens.
        if not store.cache.free_pages(lookahead + run.lookahead_pages(tree, self.policy.longest)):
            for sequence in run.sequences:
                tree.release(sequence)
            return False
        lost = False
        for sequence, swapped in zip(run.sequences, self._held.pop(run, [None] * len(own)), strict=True):
            computed = store.cache.record_hit(sequence)
            if swapped is not None and computed >= swapped.start:
                self._write(sequence, swapped, computed)
            lost |= swapped is not None and computed < swapped.start  # KV that it shared was evicted meanwhile
        self.swapped, self.recomputed = self.swapped - lost, self.recomputed + lost
        return True

    def free_swap_space(self) -> None:
        """Free the host memory."""
        self._held.clear()

    def _write(self, sequence: TreeSequence, swapped: SwappedKV, computed: int) -> None:
        """Copy swapped KV of a sequence's tokens from ``computed`` on back into its slots.

        A sample that was preempted during its recomputation had KV for its first tokens only.
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
    """Position of the first token that only these runs of one request hold, at most that of the first sampled token."""
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
    """Slots of a sequence's tokens from position ``begin`` up to the last token that has KV."""
    node = sequence.node
    while node.parent is not None and not node.computed:
        node = node.parent
    return sequence.slots()[begin : node.start + node.computed]
