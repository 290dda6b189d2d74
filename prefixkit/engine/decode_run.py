"""Samples that decode together while the tree does not change: steps are started ahead of the tokens read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.decode_batch import DecodeBatch
from prefixkit.engine.request import Sample, TokenEvent
from prefixkit.engine.sample_run import SampleRun, broken_logits, sampling_batch
from prefixkit.runners.decoder import Decoder, Sampled
from prefixkit.tree.radix import PrefixTree


@dataclass(frozen=True)
class DecodeSettings:
    """When many steps are decoded at a time, and how.

    Attributes:
        fewest_steps: A decoder takes over where some sample has so many tokens to sample: beginning it costs more than
            a step.
        ahead: Steps that may be under way while the host looks at the tokens of the one before.
        slack: Rows that have ended stay until they are one in so many: compacting costs the host a little.
        waited_for: Where other requests wait for pages, decoding goes on until one sample in so many has ended.
    """

    fewest_steps: int = 4
    ahead: int = 2
    slack: int = 16
    waited_for: int = 8


DECODE_SETTINGS = DecodeSettings()
Give = Callable[[SampleRun, Sample], None]


class DecodeRun:
    """Decodes samples, each with a leaf of its own whose last token is uncomputed, until all have ended
    or a request waits for pages.

    The tree is not touched meanwhile but for samples that end: leaves reserve pages for all tokens to come at the
    beginning, and :meth:`finish` brings the tokens of those that go on into the tree.  A sample that has ended runs on,
    unread, until rows are compacted; it writes to pages that were its own, and no other sequence gets them meanwhile.

    Args:
        tree: Where the samples' sequences live.
        decoder: Runs the steps.
        runs: The samples; at least one.
        settings: How far the host runs ahead, and when rows are compacted.
        on_token: Called with each token as it is read.
        on_step: Called after each step that was read with how many tokens counted.

    Attributes:
        steps: Steps that were started.
        rows_run: Rows of all of them.
        kv_tokens_read, kv_tokens_unshared: Token KVs that one layer read in them, and would have read for each row
            apart.
        tokens_alone: What the samples would have held unshared when they were longest.
    """

    def __init__(
        self,
        tree: PrefixTree,
        decoder: Decoder,
        runs: list[SampleRun],
        settings: DecodeSettings = DECODE_SETTINGS,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self.tree, self.decoder, self.on_token, self.on_step = tree, decoder, on_token, on_step
        self.settings = settings
        self._held = tree.allocator.num_pages - tree.allocator.free - tree.reserved
        tree.reserve([run.sequence for run in runs], [run.tokens_left for run in runs])
        snapshot = tree.snapshot()
        self.runs = sorted(runs, key=lambda run: run.sequence.node.index)
        leaf = np.array([run.sequence.node.index for run in self.runs], np.int32)
        self._end_slot = snapshot.first_slot[leaf] + snapshot.length[leaf]
        # Steps that each may take.
        self._last = np.array([run.params.max_new_tokens - len(run.tokens) for run in self.runs])
        self._stops = _stop_table(self.runs)
        self._one_by_one = np.array([run.needs_each_token or on_token is not None for run in self.runs])
        self._alive = np.ones(len(self.runs), dtype=bool)
        self._rows = np.arange(len(self.runs))  # which run each row of the decoder is
        self._rows_of_steps: list[NDArray[np.intp]] = []  # the same of steps not read yet
        # A row for each step, for one is written in each: by runs, every token would be in a cache line of its own.
        self._tokens = np.zeros((64, len(self.runs)), np.int32)
        self._logprobs = np.zeros((64, len(self.runs)), np.float32)
        self.steps = self._read = self.rows_run = self.kv_tokens_read = self.kv_tokens_unshared = 0
        self._grew = np.zeros(len(self.runs), np.int64)  # tokens that each has added to its leaf
        self.tokens_alone = sum(run.sequence.length for run in self.runs)
        self._batch, self._grown = DecodeBatch(snapshot, leaf), 0
        last = np.array([run.tokens[-1] for run in self.runs], np.int64)
        self._before = decoder.captures, decoder.seconds_capturing
        decoder.begin(self._batch, sampling_batch(self.runs), last)
        self._count_batch()

    @property
    def batch(self) -> DecodeBatch:
        """The rows that run now, as of the next step to be started."""
        if self._grown:
            self._batch, self._grown = self._batch.grown(self._grown), 0
        return self._batch

    @property
    def pages_held(self) -> int:
        """Pages of the tree and of all tokens that were sampled, as if no sample had ended; without reserved ones."""
        size, end = self.tree.page_size, self._end_slot
        return self._held + int((-(-(end + self._grew) // size) - -(-end // size)).sum())

    @property
    def ended(self) -> int:
        """Samples that have ended."""
        return int((~self._alive).sum())

    @property
    def captured(self) -> tuple[int, float]:
        """CUDA graphs captured for this run, and the seconds that they took."""
        return self.decoder.captures - self._before[0], self.decoder.seconds_capturing - self._before[1]

    def step(self, give: Give) -> None:
        """Start steps as far ahead as is allowed, and read the oldest; ``give`` releases a sample that has ended."""
        self._launch()
        self._take(self.decoder.read(), give)
        self._compact()

    def finish(self, give: Give) -> None:
        """Read what is under way, and bring the tokens of the samples that go on into the tree."""
        while self._alive.any() and self._read < self.steps:
            self._take(self.decoder.read(), give)
        self._commit()

    def _commit(self) -> None:
        """Of each sample that goes on, the last token is uncomputed again."""
        if not self._read:
            return
        alive = np.flatnonzero(self._alive)
        for i, tokens, logprobs in zip(alive.tolist(), *self._sampled(alive), strict=True):
            run = self.runs[i]
            if not self._one_by_one[i]:
                run.accept_all(tokens.tolist(), logprobs.tolist(), ends=False)
            self._grew[i] = self._read
            self.tree.extend(run.sequence, tokens)
            node = run.sequence.node
            self.tree.mark_computed([node], [node.length - 1])

    # -- one step, part by part ----------------------------------------------------------------------------------------

    def _launch(self) -> None:
        last = int(self._last[self._alive].max())
        while self.steps < min(last, self._read + self.settings.ahead):
            if self.decoder.stale:  # some callback has moved the model's weights
                self._keep(np.arange(len(self._rows)))
            self.decoder.step()
            self._rows_of_steps.append(self._rows)
            self._grown += 1
            self._count_step()

    def _take(self, sampled: Sampled, give: Give) -> None:
        """Look at the tokens of the oldest step that was not read."""
        rows, at = self._rows_of_steps.pop(0), self._read
        if at == len(self._tokens):
            self._tokens = np.vstack((self._tokens, np.zeros_like(self._tokens)))
            self._logprobs = np.vstack((self._logprobs, np.zeros_like(self._logprobs)))
        tokens, logprobs = sampled
        self._tokens[at, rows], self._logprobs[at, rows] = tokens, logprobs
        self._read += 1
        alive = self._alive[rows]
        if bool(((tokens < 0) & alive).any()):
            raise broken_logits(self.runs[int(rows[alive & (tokens < 0)][0])])
        ends = (self._stops[rows] == tokens[:, None]).any(axis=1) | (self._last[rows] == self._read)
        one_by_one = alive & self._one_by_one[rows]
        ended = rows[alive & ends & ~one_by_one]
        for i, all_tokens, all_logprobs in zip(ended.tolist(), *self._sampled(ended), strict=True):
            self._end(i, self.runs[i].accept_all(all_tokens.tolist(), all_logprobs.tolist(), ends=True), give)
        for i in rows[one_by_one].tolist():
            sample = self.runs[i].accept(int(self._tokens[at, i]), float(self._logprobs[at, i]), self.on_token)
            self._end(i, sample, give)
        if self.on_step is not None:
            self.on_step(int(alive.sum()))

    def _sampled(self, runs: NDArray[np.intp]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """``[runs, steps]`` tokens and logprobs that were read."""
        tokens, logprobs = self._tokens[: self._read, runs], self._logprobs[: self._read, runs]
        return np.ascontiguousarray(tokens.T), np.ascontiguousarray(logprobs.T)

    def _end(self, i: int, sample: Sample | None, give: Give) -> None:
        if sample is not None:
            self._alive[i] = False
            self._grew[i] = self._read - 1  # the last token never joins the tree
            give(self.runs[i], sample)

    def _compact(self) -> None:
        """Go on without the rows that have ended, once they are many."""
        alive = self._alive[self._rows]
        ended = len(alive) - int(alive.sum())
        if ended == len(alive) or ended * self.settings.slack < len(alive):
            return
        self._keep(np.flatnonzero(alive))

    def _keep(self, rows: NDArray[np.intp]) -> None:
        """Go on with these rows of the batch."""
        self._batch = self.batch.keep(rows)
        self._rows = self._rows[rows]
        self.decoder.keep(self._batch, rows)
        self._count_batch()

    # -- counting ------------------------------------------------------------------------------------------------------

    def _count_batch(self) -> None:
        tree, leaf = self.batch.snapshot, self.batch.leaf
        length = tree.computed.copy()
        length[leaf] = tree.length[leaf]
        self._reads = self.decoder.planned.kv_tokens_read(length)
        self._alone = int((tree.start + tree.length)[leaf].sum())

    def _count_step(self) -> None:
        rows = len(self._rows)
        self.steps += 1
        self.rows_run += rows
        self.kv_tokens_read += self._reads
        self.kv_tokens_unshared += self._alone
        self.tokens_alone = max(self.tokens_alone, self._alone)
        self._reads, self._alone = self._reads + rows, self._alone + rows  # each row's leaf grows


def _stop_table(runs: list[SampleRun]) -> NDArray[Any]:
    """``[runs, most]`` the tokens that end each run, -1 where it has fewer than others."""
    stops = [run.params.stop_token_ids or () for run in runs]
    most = max(map(len, stops))
    table = np.full((len(runs), max(1, most)), -1, np.int64)
    for row, tokens in zip(table, stops, strict=True):
        row[: len(tokens)] = tokens
    return table
