"""Computing contexts over a prefix tree, step by step, and handing out what is wanted of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixkit.engine.scoring.contexts import Contexts, Longs, Text, lay_out
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Outputs, Results, Runner
from prefixkit.runners.wanted_tokens import OutputsOf, compute_wanted
from prefixkit.tree.radix import Sequence as TreeSequence

# Slots for states: of a text at its end and at a fork above it, and those that are made before others are dropped.
_SLOTS_PER_TEXT, _SPARE_SLOTS = 2, 4


@dataclass(eq=False)
class ContextRun:
    """Computes texts, as many at a time as the store holds.

    Attributes:
        runner: Runs steps.
        store: Where KV lives.
        chunk: Tokens that a step computes at most.
        report: What was computed is added to it.
    """

    runner: Runner
    store: KVStore
    chunk: int
    report: Report
    _held: list[TreeSequence] = field(default_factory=list)

    def results(
        self, texts: Sequence[Text], outputs: OutputsOf, most_wanted: int | None = None
    ) -> Iterator[tuple[Longs, Results]]:
        """The results of each step, and the numbers of its wanted tokens; tensors may be read later.

        Args:
            texts: What is to be computed; their wanted tokens are numbered, one text after the other.
            outputs: What the rows of wanted tokens give.
            most_wanted: After how many tokens of a step something may be wanted; None: all.
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
            self._held.clear()  # what it left of the tree may not be fit for releasing
            raise
        finally:
            while self._held:
                self.store.tree.release(self._held.pop())

    def _admit(self, contexts: Contexts, begin: int) -> int:
        """Insert contexts from ``begin`` on until one does not fit; returns which."""
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
        """Compute the contexts that are held, from ``begin`` to ``end``, and what is wanted of their own tokens."""
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
        """``[2, own tokens]`` of the contexts that are held, from ``begin`` on: index of the node, place in it."""
        self.store.tree.snapshot()  # which numbers the nodes
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
