"""Computing contexts over a prefix tree, step by step, and handing out what is wanted of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.uncomputed import tokens_of
from prefixkit.engine.scoring.contexts import Contexts
from prefixkit.engine.sharing_report import BatchCounts, Report
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Batch, Outputs, Results, Runner
from prefixkit.runners.tree_step import launch_step
from prefixkit.tree.node import Node
from prefixkit.tree.radix import Sequence

Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The query rows of several steps, laid end to end: parts of nodes, ancestors first.

    Attributes:
        nodes: The node of each part.
        begin: ``[parts]`` the first of its tokens that runs.
        bound: ``[parts + 1]`` bounds of each part's rows.
        first_index: ``[parts]`` the index of the part's first row, see ``Contexts``.
        wanted: ``[rows]`` whether something is wanted after a row; only then its index counts.
    """

    nodes: list[Node]
    begin: Longs
    bound: Longs
    first_index: Longs
    wanted: NDArray[np.bool_]

    def steps(self, most: int, most_wanted: int) -> Iterator[tuple[int, int]]:
        """Ranges of at most ``most`` rows, and ``most_wanted`` after which something is wanted."""
        count, begin = np.cumsum(self.wanted), 0
        while begin < len(count):
            before = int(count[begin - 1]) if begin else 0
            end = min(begin + most, int(np.searchsorted(count, before + most_wanted, "right")))
            yield begin, end
            begin = end


@dataclass(eq=False)
class ContextRun:
    """Computes contexts, as many at a time as the store holds.

    Attributes:
        runner: Runs steps.
        store: Where KV lives.
        contexts: What is to be computed.
        chunk: Tokens that a step computes at most.
        most_wanted: After how many of them something may be wanted.
        report: What was computed is added to it.
        outputs: From query rows, one for each of some wanted tokens, and from a range of ``contexts.number`` that says
            which, to what the rows give.
        accept: Takes the results of a step, and the same range; they may be read later.
        held: The sequences of the contexts that are in the tree.
    """

    runner: Runner
    store: KVStore
    contexts: Contexts
    chunk: int
    most_wanted: int
    report: Report
    outputs: Callable[[Longs, slice], Outputs]
    accept: Callable[[Results, slice], None]
    held: list[Sequence] = field(default_factory=list)

    def run(self) -> None:
        begin = 0
        try:
            while begin < len(self.contexts.chosen):
                end = self._admit(begin)
                self._compute(self._rows(begin))
                while self.held:
                    self.store.retain(self.held.pop())
                begin = end
        except KeyboardInterrupt:
            self.held.clear()  # what it left of the tree may not be fit for releasing
            raise
        finally:
            while self.held:
                self.store.tree.release(self.held.pop())

    def _admit(self, begin: int) -> int:
        """Insert contexts from ``begin`` on until one does not fit; returns which."""
        alone = 0
        for number in range(begin, len(self.contexts.chosen)):
            tokens = self.contexts.tokens(number)
            sequence = self.store.admit(tokens, alone=not self.held)
            if sequence is None:
                return self._admitted(number, alone)
            self.held.append(sequence)
            alone += len(tokens)
        return self._admitted(len(self.contexts.chosen), alone)

    def _admitted(self, end: int, alone: int) -> int:
        held = self.store.tree.pages_held() * self.store.tree.page_size
        self.report.add_batch(BatchCounts(0, 0, 0, 0, held, alone), self.store.pool.spec.bytes_per_token)
        return end

    def _rows(self, begin_at: int) -> _Rows:
        """What has to run of the contexts that are held, from ``begin_at`` on.

        Of the first one that is all that is uncomputed, for its ancestors may have been evicted since, and what is
        wanted of its own tokens; of the others, of their own tokens.
        """
        contexts = self.contexts
        nodes, begins, indices, wanted = list[Node](), list[int](), list[int](), list[NDArray[np.bool_]]()
        for number, sequence in enumerate(self.held, begin_at):
            shared = contexts.shared[number]
            for node in _path(sequence.node, shared if number > begin_at else 0):
                first = contexts.first[number] - shared + node.start  # of the node's first token, if it is an own one
                skip = min(max(shared - node.start, 0), node.length)
                asked = np.zeros(node.length, np.bool_)
                asked[skip:] = contexts.wanted[first + skip : first + node.length]
                begin = min(node.computed, int(asked.argmax())) if asked.any() else node.computed
                if begin < node.length:
                    nodes.append(node)
                    begins.append(begin)
                    indices.append(first + begin)
                    wanted.append(asked[begin:])
        bound = np.cumsum([0, *map(len, wanted)])
        return _Rows(nodes, np.array(begins, np.int64), bound, np.array(indices, np.int64), np.concatenate(wanted))

    def _compute(self, rows: _Rows) -> None:
        for begin, end in rows.steps(self.chunk, self.most_wanted):
            self._launch(rows, begin, end)
            counts = BatchCounts(1, end - begin, *self.runner.reads, 0, 0)
            self.report.add_batch(counts, self.store.pool.spec.bytes_per_token)

    def _launch(self, rows: _Rows, begin: int, end: int) -> None:
        """Run rows ``[begin, end)``."""
        tree, contexts = self.store.tree, self.contexts
        snapshot, nodes = tree.snapshot(), tree.nodes()
        first, last = np.searchsorted(rows.bound, begin, "right") - 1, np.searchsorted(rows.bound, end)
        parts = np.arange(first, last)
        low = rows.begin[parts] + np.maximum(begin - rows.bound[parts], 0)
        high = rows.begin[parts] + np.minimum(end, rows.bound[parts + 1]) - rows.bound[parts]
        index = np.array([node.index for node in rows.nodes[first:last]], np.int32)
        order = np.argsort(index)
        queries = Queries(*(of[order].astype(np.int32) for of in (index, low, high)))
        step = StepTree(snapshot, queries)
        # Rows after which something is wanted: by index, and in the order of the step.
        asked = begin + np.flatnonzero(rows.wanted[begin:end])
        part = np.searchsorted(rows.bound, asked, "right") - 1
        within, at = rows.begin[part] - low[part - first], rows.first_index[part] + asked - rows.bound[part]
        row = step.first_row[index[part - first]] + within + asked - rows.bound[part]
        which = slice(0, 0)
        if len(asked):
            which = slice(*np.searchsorted(contexts.index, (at[0], at[-1] + 1)).tolist())
        rows_of = row[np.searchsorted(at, contexts.index[which])]
        outputs = self.outputs(rows_of, which) if len(asked) else Outputs()
        batch = Batch(step, tokens_of(queries, nodes), outputs)
        launch_step(self.runner, tree, batch, [nodes[node] for node in queries.node.tolist()])
        if len(asked):
            self.accept(self.runner.read(), which)


def _path(node: Node, begin: int) -> list[Node]:
    """The nodes above ``node`` and itself whose tokens lie at positions from ``begin`` on, ancestors first."""
    path, above = list[Node](), node
    while above.parent is not None and above.start >= begin:
        path.append(above)
        above = above.parent
    return path[::-1]
