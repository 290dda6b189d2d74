"""Compute contexts over a prefix tree, step by step, and yield the results of their wanted tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixkit.engine.scoring.contexts import Contexts, Text, lay_out
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Outputs, Results, Runner
from prefixkit.runners.wanted_tokens import OutputsOf, compute_wanted
from prefixkit.tree.arrays import Longs
from prefixkit.tree.radix import Sequence as TreeSequence

# Slots for states: each text needs one at its end and one at a fork above it; spare ones are written before old ones
# are dropped.
_SLOTS_PER_TEXT, _SPARE_SLOTS = 2, 4


@dataclass(eq=False)
class ContextRun:
    """Computes texts, as many at a time as the store holds.

    Attributes:
        runner: Runs steps.
        store: Holds the KV.
        chunk: Most tokens that a step computes.
        report: Counts the steps.
    """

    runner: Runner
    store: KVStore
    chunk: int
    report: Report
    _held: list[TreeSequence] = field(default_factory=list)

    def results(
        self, texts: Sequence[Text], outputs: OutputsOf, most_wanted: int | None = None
    ) -> Iterator[tuple[Longs, Results]]:
        """Yield the numbers of each step's wanted tokens, and its results; their tensors may be read later.

        Args:
            texts: The texts to compute; their wanted tokens are numbered consecutively, text by text.
            outputs: Returns the outputs wanted of the rows of wanted tokens.
            most_wanted: Most wanted tokens of a step; None: any number.
        """
        contexts, begin = lay_out(texts), 0
        self.store.touch(contexts.tokens)
        try:
            while begin < len(contexts.tokens):
                end = self._admit(contexts, begin)
                yield from self._compute(contexts, begin, end, outputs, most_wanted)
                while self._held:
                    self.store.retain(self._held.pop())
                begin = end
        except KeyboardInterrupt:
            self._held.clear()  # the interrupt may have left the tree in a state in which it cannot be released
            raise
        finally:
            while self._held:
                self.store.tree.release(self._held.pop())

    def _admit(self, contexts: Contexts, begin: int) -> int:
        """Insert contexts from ``begin`` on until one does not fit; returns the index of that one."""
        tree, unshared = self.store.tree, 0
        most = len(contexts.tokens)
        if tree.states is not None:
            least = _SLOTS_PER_TEXT + _SPARE_SLOTS
            self.store.have_slots(max(_SLOTS_PER_TEXT * (most - begin) + _SPARE_SLOTS, least), least)
            most = (tree.states.count - _SPARE_SLOTS) // _SLOTS_PER_TEXT
        for tokens in contexts.tokens[begin : begin + most]:
            if (sequence := self.store.admit(tokens, alone=not self._held)) is None:
                break
            self._held.append(sequence)
            unshared += len(tokens)
        size = self.store.pool.spec.bytes_per_token
        held = tree.pages_held() * tree.page_size
        self.report.add({"kv_bytes_held_peak": held * size, "kv_bytes_unshared_peak": unshared * size})
        return begin + len(self._held)

    def _compute(
        self, contexts: Contexts, begin: int, end: int, outputs: OutputsOf, most_wanted: int | None
    ) -> Iterator[tuple[Longs, Results]]:
        """Compute the inserted contexts from ``begin`` to ``end``, and the results of their wanted own tokens."""
        low, high = contexts.first[begin], contexts.first[end]
        numbers = np.flatnonzero((contexts.index >= low) & (contexts.index < high))
        node, offset = self._places(contexts, begin)[:, contexts.index[numbers] - low]

        def given(rows: Longs, which: Longs) -> Outputs:
            return outputs(rows, numbers[which])

        most = self.chunk if most_wanted is None else most_wanted
        for batch, which in compute_wanted(self.runner, self.store.tree, node, offset, given, self.chunk, most):
            if len(which):
                yield numbers[which], self.runner.read()
            read, unshared = (tokens * self.store.pool.spec.bytes_per_token for tokens in self.runner.reads)
            counts = {"steps": 1, "tokens_computed": len(batch.tokens), "kv_bytes_read": read}
            each = self.store.pool.spec.bytes_per_state
            counts |= {"state_bytes_held_peak": self.store.tree.states_held() * each, "bytes_per_state": each}
            self.report.add({**counts, "kv_bytes_read_unshared": unshared})

    def _places(self, contexts: Contexts, begin: int) -> Longs:
        """``[2, own tokens]`` of the inserted contexts from ``begin`` on: index of the node, offset in it."""
        self.store.tree.snapshot()  # numbers the nodes
        low, high = contexts.first[begin], contexts.first[begin + len(self._held)]
        places = np.empty((2, high - low), np.int64)
        for number, sequence in enumerate(self._held, begin):
            first, stop, node = contexts.first[number] - low, contexts.first[number + 1] - low, sequence.node
            while stop > first and node.parent is not None:
                count = min(node.length, stop - first)
                places[0, stop - count : stop] = node.index
                places[1, stop - count : stop] = np.arange(node.length - count, node.length)
                stop, node = stop - count, node.parent
        return places
