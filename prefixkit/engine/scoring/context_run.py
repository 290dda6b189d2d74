"""Computing contexts over a prefix tree, step by step, and handing out what is wanted of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.uncomputed import tokens_of
from prefixkit.engine.scoring.contexts import Contexts, Longs, Text, lay_out
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Batch, Outputs, Results, Runner, launch_step
from prefixkit.tree.radix import Sequence as TreeSequence

# From query rows, one for each of some wanted tokens, and the numbers of these, to what the rows give.
OutputsOf = Callable[[Longs, Longs], Outputs]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The query rows of several steps, in the order of the snapshot, so ancestors first.

    Attributes:
        node, token: ``[rows]`` the node, and which of its tokens.
        index: ``[rows]`` the token's index where something is wanted after it, else -1.
    """

    node: Longs
    token: Longs
    index: Longs

    def steps(self, most: int, most_wanted: int) -> Iterator[slice]:
        """Ranges of at most ``most`` rows, and ``most_wanted`` after which something is wanted."""
        wanted, begin = np.flatnonzero(self.index >= 0), 0
        while begin < len(self.index):
            last = int(np.searchsorted(wanted, begin)) + most_wanted
            end = min(begin + most, int(wanted[last]) if last < len(wanted) else len(self.index))
            yield slice(begin, end)
            begin = end

    def queries(self, step: slice) -> Queries:
        """The rows of a step, by their nodes."""
        node, first, count = np.unique(self.node[step], return_index=True, return_counts=True)
        begin = self.token[step][first]
        return Queries(*(of.astype(np.int32) for of in (node, begin, begin + count)))


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
        try:
            while begin < len(contexts.texts):
                end = self._admit(contexts, begin)
                rows = self._rows(contexts, begin)
                yield from self._compute(rows, contexts, outputs, self.chunk if most_wanted is None else most_wanted)
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
        for text in contexts.texts[begin:]:
            tokens = text.tokens
            if (sequence := self.store.admit(tokens, alone=not self._held)) is None:
                break
            self._held.append(sequence)
            unshared += len(tokens)
        size = self.store.pool.spec.bytes_per_token
        held = tree.pages_held() * tree.page_size
        self.report.add({"kv_bytes_held_peak": held * size, "kv_bytes_unshared_peak": unshared * size})
        return begin + len(self._held)

    def _rows(self, contexts: Contexts, begin: int) -> _Rows:
        """What has to run of the contexts that are held, from ``begin`` on.

        Of the first one that is all that is uncomputed, for its ancestors may have been evicted since, and what is
        wanted of its own tokens; of the others, of their own tokens.
        """
        snapshot = self.store.tree.snapshot()
        offset, own = np.zeros((2, snapshot.num_nodes), np.int64)  # index less position; the first own position
        runs = np.zeros(snapshot.num_nodes, np.bool_)
        for number, sequence in enumerate(self._held, begin):
            shared, node = contexts.shared[number], sequence.node
            while node.parent is not None and (number == begin or node.start >= shared):
                runs[node.index], own[node.index] = True, shared
                offset[node.index] = contexts.first[number] - shared
                node = node.parent
        part = np.flatnonzero(runs)
        length = snapshot.length[part].astype(np.int64)
        bound = np.cumsum(length) - length
        of = np.repeat(part, length)
        token = np.arange(len(of)) - np.repeat(bound, length)
        position = snapshot.start[of] + token
        index = np.where(position >= own[of], offset[of] + position, -1)
        index[~contexts.wanted[index]] = -1
        first_wanted = np.minimum.reduceat(np.where(index >= 0, token, len(token)), bound)
        taken = token >= np.repeat(np.minimum(snapshot.computed[part], first_wanted), length)
        return _Rows(of[taken], token[taken], index[taken])

    def _compute(
        self, rows: _Rows, contexts: Contexts, outputs: OutputsOf, most_wanted: int
    ) -> Iterator[tuple[Longs, Results]]:
        tree, wanted = self.store.tree, np.flatnonzero(rows.index >= 0)
        row_of = np.full(len(contexts.wanted), -1, np.int64)
        row_of[rows.index[wanted]] = wanted
        row = row_of[contexts.index]  # of each wanted token, -1 for those of other contexts
        numbers = np.argsort(row, kind="stable")
        row = row[numbers]
        for step in rows.steps(self.chunk, most_wanted):
            queries, nodes = rows.queries(step), tree.nodes()
            which = slice(*np.searchsorted(row, (step.start, step.stop)).tolist())
            asked = which.start < which.stop
            given = outputs(row[which] - step.start, numbers[which]) if asked else Outputs()
            batch = Batch(StepTree(tree.snapshot(), queries), tokens_of(queries, nodes), given)
            launch_step(self.runner, tree, batch, [nodes[node] for node in queries.node.tolist()])
            if asked:
                yield numbers[which], self.runner.read()
            read, unshared = (tokens * self.store.pool.spec.bytes_per_token for tokens in self.runner.reads)
            rows_run = step.stop - step.start
            counts = {"steps": 1, "tokens_computed": rows_run, "kv_bytes_read": read}
            self.report.add({**counts, "kv_bytes_read_unshared": unshared})
