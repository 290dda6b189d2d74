"""Computing contexts over a prefix tree, step by step, and what their continuations' tokens come to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.uncomputed import tokens_of
from prefixkit.engine.contexts import Contexts
from prefixkit.engine.sharing_report import BatchCounts, Report
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Batch, Outputs, Runner, Targets
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
        place: ``[parts]`` the place of the part's first row.
        wanted: ``[rows]`` whether the logits of a row are wanted; only then its place counts.
    """

    nodes: list[Node]
    begin: Longs
    bound: Longs
    place: Longs
    wanted: NDArray[np.bool_]

    def steps(self, most: int, most_wanted: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows with so many rows at most, and so many whose logits are wanted."""
        count, begin = np.cumsum(self.wanted), 0
        while begin < len(count):
            before = int(count[begin - 1]) if begin else 0
            end = min(begin + most, int(np.searchsorted(count, before + most_wanted, "right")))
            yield begin, end
            begin = end


@dataclass(eq=False)
class Scoring:
    """Computes contexts, as many at a time as the pool holds.

    Attributes:
        runner: Runs steps.
        store: Where KV lives.
        contexts: What is to be computed.
        chunk: Tokens that a step computes at most.
        most_wanted: Of how many of them the logits may be wanted.
        report: What was computed is added to it.
    Attributes:
        logprobs, greedy: ``[scored]`` the results, in the order of the call.
        held: The sequences of the contexts that are in the tree.
    """

    runner: Runner
    store: KVStore
    contexts: Contexts
    chunk: int
    most_wanted: int
    report: Report
    held: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.contexts.target)
        self.logprobs, self.greedy = np.full(count, np.nan, np.float32), np.zeros(count, np.bool_)

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

    def _rows(self, first: int) -> _Rows:
        """What has to run of the contexts that are held, from ``first`` on.

        Of the first one that is all that is uncomputed, for its ancestors may have been evicted since, and what is
        wanted of its own tokens; of the others, of their own tokens.
        """
        contexts = self.contexts
        nodes, begins, places, wanted = list[Node](), list[int](), list[int](), list[NDArray[np.bool_]]()
        for number, sequence in enumerate(self.held, first):
            shared = contexts.shared[number]
            for node in _path(sequence.node, shared if number > first else 0):
                place = contexts.first[number] - shared + node.start  # of the node's first token, if it is an own one
                skip = min(max(shared - node.start, 0), node.length)
                asked = np.zeros(node.length, np.bool_)
                asked[skip:] = contexts.wanted[place + skip : place + node.length]
                begin = min(node.computed, int(asked.argmax())) if asked.any() else node.computed
                if begin < node.length:
                    nodes.append(node)
                    begins.append(begin)
                    places.append(place + begin)
                    wanted.append(asked[begin:])
        bound = np.cumsum([0, *map(len, wanted)])
        return _Rows(nodes, np.array(begins, np.int64), bound, np.array(places, np.int64), np.concatenate(wanted))

    def _compute(self, rows: _Rows) -> None:
        """Run all rows, and read what came of them at the end: until then the host does not wait for a device."""
        results = list[tuple[slice, Tensor, Tensor]]()
        for begin, end in rows.steps(self.chunk, self.most_wanted):
            results += self._launch(rows, begin, end)
            counts = BatchCounts(1, end - begin, *self.runner.reads, 0, 0)
            self.report.add_batch(counts, self.store.pool.spec.bytes_per_token)
        number = np.concatenate([self.contexts.number[which] for which, _, _ in results])
        logprobs = torch.cat([logprobs for _, logprobs, _ in results]).cpu().numpy()
        if len(broken := number[np.isnan(logprobs)]):
            raise _broken_logits(self.contexts, int(broken.min()))
        self.logprobs[number] = logprobs
        self.greedy[number] = torch.cat([greedy for _, _, greedy in results]).cpu().numpy()

    def _launch(self, rows: _Rows, begin: int, end: int) -> list[tuple[slice, Tensor, Tensor]]:
        """Run rows ``[begin, end)``; which scored tokens that gives, their log-probabilities, and whether greedy
        decoding takes them.
        """
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
        # Rows whose logits are wanted: by place, and in the order of the step.
        asked = begin + np.flatnonzero(rows.wanted[begin:end])
        part = np.searchsorted(rows.bound, asked, "right") - 1
        within, place = rows.begin[part] - low[part - first], rows.place[part] + asked - rows.bound[part]
        row = step.first_row[index[part - first]] + within + asked - rows.bound[part]
        which, targets = slice(0, 0), None
        if len(asked):
            which = slice(*np.searchsorted(contexts.place, (place[0], place[-1] + 1)).tolist())
            targets = Targets(row[np.searchsorted(place, contexts.place[which])], contexts.target[which])
        batch = Batch(step, tokens_of(queries, nodes), Outputs(targets=targets))
        launch_step(self.runner, tree, batch, [nodes[node] for node in queries.node.tolist()])
        if targets is None:
            return []
        results = self.runner.read()
        assert results.target_logprobs is not None and results.target_greedy is not None, "asked for"
        return [(which, results.target_logprobs, results.target_greedy)]


def _path(node: Node, begin: int) -> list[Node]:
    """The nodes above ``node`` and itself whose tokens lie at positions from ``begin`` on, ancestors first."""
    path, above = list[Node](), node
    while above.parent is not None and above.start >= begin:
        path.append(above)
        above = above.parent
    return path[::-1]


def _broken_logits(contexts: Contexts, number: int) -> ValueError:
    """What to raise where a token, counted through all continuations, has no log-probability."""
    prompt, continuation, token = contexts.whose(number)
    return ValueError(
        f"the logits before token {token} of continuation {continuation} of prompt {prompt} hold NaN, +inf or no "
        "finite value, so it has no log-probability; look at what the model computed"
    )
