"""Steps over the rows of a padded batch: which tokens run, and the logits that come of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.queries import StepTree, decode_tree
from prefixkit.attention.uncomputed import choose_queries, tokens_of
from prefixkit.models.generate.tree_memory import TreeMemory
from prefixkit.runners.batch import Batch, Outputs
from prefixkit.runners.tree_step import launch_step
from prefixkit.tree.node import Node
from prefixkit.tree.pages import OutOfPages
from prefixkit.tree.rows import Rows


class RowSteps:
    """Rows whose KV is in a tree, and the steps that bring it there.

    While rows only grow, a decode step is the last one repeated: the tree takes the tokens of such steps later, when
    something asks for it (:meth:`flushed`).

    Args:
        memory: Pool, tree and runner.
        rows: The rows, over that tree.

    Attributes:
        memory: The same.
        rows: The same, without the tokens of repeated steps.
    """

    def __init__(self, memory: TreeMemory, rows: Rows) -> None:
        self.memory, self.rows = memory, rows
        self._order: tuple[Tensor, Tensor] | None = None  # the runner's rows and ours, while steps are repeated
        self._ahead: list[Tensor] = []  # tokens of the steps that the tree has not taken yet

    @property
    def length(self) -> int:
        """Tokens of each row, padding included."""
        return self.rows.length + len(self._ahead)

    @property
    def repeats(self) -> bool:
        """Whether the next decode step is the last one repeated."""
        return self._order is not None

    def flushed(self) -> Rows:
        """The rows, once the tree holds all tokens that were computed; the next decode step is not repeated."""
        rows, self._order = self.rows, None
        if self._ahead:
            tokens = torch.stack(self._ahead, 1).cpu().numpy().astype(np.int32)
            self._ahead = []
            rows.extend(tokens)
            nodes = [sequence.node for sequence in rows.sequences]
            rows.tree.mark_computed(nodes, [node.length for node in nodes])
        return rows

    def extend(self, tokens: Tensor) -> None:
        """Append ``[rows, count]`` tokens; nothing is computed yet.

        Raises:
            DoesNotFit: the pool has to grow, and there is no memory for it; nothing has changed.
        """
        rows, own = self.flushed(), tokens.cpu().numpy().astype(np.int32)
        while True:
            try:
                return rows.extend(own)
            except OutOfPages as error:
                if self.memory.store.cache.free_pages(error.asked):
                    continue
                self.memory.grow(error.asked - error.free + self.memory.store.pool.num_pages // 4)

    def decode(self, tokens: Tensor, final_length: int, fork: bool) -> Tensor:
        """Append a token to each row, and compute it.

        Args:
            tokens: ``[rows]``, where the model runs.
            final_length: Tokens that rows will reach, as far as is known.
            fork: Whether rows part as beams do.

        Returns:
            ``[rows, vocab]`` the logits after them.
        """
        if self._order is None:
            self.extend(tokens[:, None])
            logits = self._launch(final_length - self.length, fork)
            return self.compute(1)[:, 0] if logits is None else logits
        order, place = self._order
        self.memory.runner.repeat(tokens.index_select(0, order))
        self._ahead.append(tokens)
        if self.length >= final_length:
            self._order = None  # no leaf holds more pages
        return self.memory.runner.logits.index_select(0, place)

    def _launch(self, left: int, fork: bool) -> Tensor | None:
        """Compute the last token of each row, if that is all there is to compute and each has a leaf of its own.

        Where rows only grow, their leaves take the pages of all ``left`` tokens to come, and this step is repeated.
        """
        tree, runner = self.memory.store.tree, self.memory.runner
        nodes = [sequence.node for sequence in self.rows.sequences]
        goes_on = left > 0 and not fork and all(node.grows_in_place for node in nodes)
        if goes_on:
            try:
                tree.reserve(self.rows.sequences, [left] * len(nodes))
            except OutOfPages:
                goes_on = False
        snapshot = tree.snapshot()
        leaves = np.array([node.index for node in nodes], np.int32)
        uncomputed = snapshot.length - snapshot.computed
        if uncomputed.sum() != len(leaves) or (uncomputed[leaves] != 1).any():
            return None
        order = np.argsort(leaves, kind="stable")
        last = np.array([node.last_token for node in nodes], np.int32)[order]
        step, every = decode_tree(snapshot, leaves[order]), np.arange(len(leaves))
        launch_step(runner, tree, Batch(step, last, Outputs(every), steps=1 + left), [nodes[i] for i in order.tolist()])
        there, place = (torch.from_numpy(of).to(runner.logits.device) for of in (order, np.argsort(order)))
        if goes_on:
            self._order = there, place
        return runner.logits.index_select(0, place)

    def compute(self, count: int) -> Tensor:
        """Compute what is uncomputed, in steps of at most ``memory.chunk`` tokens.

        Returns:
            ``[rows, count, vocab]`` the logits after the last ``count`` tokens of each row; zeros after padding.
        """
        rows = self.flushed()
        row, from_end, nodes, offsets = zip(*rows.last_tokens(count), strict=True)
        offset, source = np.array(offsets), np.full(len(row), -1)  # where the logits of each place are among all
        parts, computed = list[Tensor](), 0
        while (step := self._next_step(nodes, offset[source < 0], np.flatnonzero(source < 0))) is not None:
            index, begin = np.array([node.index for node in nodes]), np.zeros(step.snapshot.num_nodes, np.int64)
            begin[step.queries.node] = step.queries.begin
            within = offset - begin[index]
            here = np.flatnonzero((within >= 0) & (within < step.own_rows[index]))
            wanted, place = np.unique(step.first_row[index[here]] + within[here], return_inverse=True)
            source[here], computed = computed + place, computed + len(wanted)
            parts.append(self._run(step, wanted))
        logits = torch.cat(parts)
        out = logits.new_zeros(len(rows), count, logits.shape[1])
        at = count - 1 - np.array(from_end)
        there = [torch.from_numpy(of).to(logits.device) for of in (np.array(row), at, source)]
        out[there[0], there[1]] = logits[there[2]]
        return out

    def _next_step(self, nodes: tuple[Node, ...], offset: np.ndarray, pending: np.ndarray) -> StepTree | None:
        """The next step of all that is uncomputed, and of the tokens ``pending``, whose logits are still wanted."""
        snapshot, first = self.memory.store.tree.snapshot(), dict[int, int]()
        for at, which in zip(offset.tolist(), pending.tolist(), strict=True):
            index = nodes[which].index
            first[index] = min(at, first.get(index, at))
        return choose_queries(snapshot, [], list(first), self.memory.chunk, list(first.values()))

    def copy_kv(self, other: RowSteps) -> None:
        """Give another cache's rows of the same tokens a copy of the KV."""
        rows, theirs, store = self.flushed(), other.rows, other.memory.store
        own = np.arange(rows.length) >= rows.pad[:, None]
        target, first = np.unique(theirs.slots()[own], return_index=True)
        store.pool.copy(rows.slots()[own][first], target, self.memory.store.pool)
        nodes = store.tree.nodes()
        store.tree.mark_computed(nodes, [node.length for node in nodes])

    def end(self) -> None:
        """Give the store back, where the rows' KV is retained, unless it cannot be used again."""
        store = self.memory.store
        drop = store.retain
        try:
            rows = self.flushed()
        except (RuntimeError, OutOfPages):  # the device has failed, or the tree is not what was computed
            rows, drop = self.rows, store.tree.release
        for sequence in rows.detach():
            drop(sequence)
        self.memory.return_()

    def abandon(self) -> None:
        """Give the store back with a new tree: an interrupt may have left the present one half changed."""
        self.memory.store.restart()
        self.memory.return_()

    def _run(self, step: StepTree, wanted: np.ndarray) -> Tensor:
        """Run a step; returns the logits of the query rows that are wanted."""
        tree = self.memory.store.tree
        queries, nodes = step.queries, tree.nodes()
        running = [nodes[node] for node in queries.node.tolist()]
        launch_step(self.memory.runner, tree, Batch(step, tokens_of(queries, nodes), Outputs(wanted)), running)
        return self.memory.runner.logits.clone()
