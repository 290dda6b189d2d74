"""The sequences that a runner is at work on: from the launch of their step until the tree holds their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.next_step import Scheduled
from prefixkit.engine.request import Sample, TokenEvent
from prefixkit.engine.runs.beam_run import BeamRun, advance_beams
from prefixkit.engine.runs.sample_run import SampleRun
from prefixkit.runners.batch import Runner, Sampled
from prefixkit.tree.radix import PrefixTree, Sequence

# Takes the samples with which a sample or a beam search has ended.
Give = Callable[[SampleRun | BeamRun, list[Sample]], None]


class RunningBatch:
    """Runs what is scheduled, reads what comes of it, and commits it to the tree.

    Samples alone are pipelined: steps are launched ahead of the tokens read, over leaves that hold the pages of all
    their tokens to come.  The tree is not touched meanwhile but for samples that end; :meth:`commit` brings the tokens
    of those that go on.  A sample that has ended runs on, unread, until rows are compacted; it writes to pages that
    were its own, and no other sequence gets them meanwhile.  Anything else is committed after its one step.

    Args:
        tree: Where the sequences live.
        runner: Runs the steps.
        scheduled: What is to run.
        on_token: Called with each token of a sample as it is read.
        on_step: Called after each step that was read with how many tokens of samples counted.

    Attributes:
        steps: Steps that were launched.
        rows_run: Query rows of all of them.
        kv_tokens_read, kv_tokens_unshared: Token KVs that one layer read in them, and would have read for each row
            apart.
        tokens_alone: What the sequences would have held unshared when they were longest.
    """

    def __init__(
        self,
        tree: PrefixTree,
        runner: Runner,
        scheduled: Scheduled,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self.tree, self.runner, self.scheduled = tree, runner, scheduled
        self.on_token, self.on_step = on_token, on_step
        self._held = tree.pages_held()
        self._end_slot = self._grew = np.empty(0, np.int64)
        self._runs = [run for _, run in scheduled.rows]
        self._rows = np.arange(len(self._runs))  # which run each row of the runner is
        self._rows_of_steps: list[NDArray[np.intp]] = []  # the same of steps not read yet
        self._known: Sampled | None = None  # what came of logits that were known
        self._launched = self._read = self.rows_run = self.kv_tokens_read = self.kv_tokens_unshared = 0
        self.tokens_alone = 0

    def _prepare_to_take(self) -> None:
        """Make what :meth:`take` needs, while the device is at work."""
        scheduled = self.scheduled
        samples = [run if isinstance(run, SampleRun) else None for run in self._runs]
        row_of = {sequence: row for row, (sequence, _) in enumerate(scheduled.rows)}
        beams = [run for run in dict.fromkeys(self._runs) if isinstance(run, BeamRun)]
        self._beams = {run: [row_of[sequence] for sequence in run.sequences] for run in beams}  # and their rows
        self._end_slot = np.array([sequence.node.end_slot for sequence, _ in scheduled.rows], np.int64)
        self._grew = np.zeros(len(samples), np.int64)  # tokens that each has added to its leaf
        # Steps that each may take.
        self._last = np.array([0 if run is None else 1 + run.tokens_left for run in samples], np.int64)
        self._stops = _stop_table(samples)
        one_by_one = [run is not None and (self.on_token is not None or run.by_token) for run in samples]
        self._one_by_one = np.array(one_by_one, dtype=bool)
        self._alive = np.array([run is not None for run in samples], dtype=bool)
        # A row for each step, for one is written in each: by runs, every token would be in a cache line of its own.
        shape = 64 if scheduled.pipelined else 1, len(samples)
        self._tokens, self._logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        self._grow: list[tuple[Sequence, int]] = []  # what beams go on with

    @property
    def steps(self) -> int:
        return 0 if self.scheduled.batch is None else self._launched

    @property
    def decodes(self) -> bool:
        """Whether its steps run no prompt tokens."""
        return self.scheduled.batch is not None and self.scheduled.batch.decodes

    @property
    def unpipelined(self) -> set[str]:
        """Why the next step cannot be launched before the tokens of this one are read."""
        return {run.unpipelined for run in self._runs if run.unpipelined is not None}

    @property
    def pages_held(self) -> int:
        """Pages of the tree and of all tokens that were sampled, as if no sample had ended; without reserved ones."""
        size, end = self.tree.page_size, self._end_slot
        return self._held + int((-(-(end + self._grew) // size) - -(-end // size)).sum())

    def done(self, others_wait: bool) -> bool:
        """Whether the tree is to take the tokens now: nothing is left to run, or others may come in."""
        ended = len(self._alive) - int(self._alive.sum())
        if not self.scheduled.pipelined or ended == len(self._alive) or self._launched >= self.scheduled.most_steps:
            return True
        return others_wait and ended > 0 and ended * self.runner.pace.waited_for >= len(self._alive)

    def take(self, give: Give) -> None:
        """Read the oldest step that was launched; ``give`` releases what has ended."""
        sampled, self._known = self._known, None
        self._take(self.runner.read() if sampled is None else sampled, give)
        if self.scheduled.pipelined:
            self._compact()

    def commit(self, give: Give) -> None:
        """Read what is under way, and bring the tokens of the sequences that go on into the tree.

        Of each, the last token is uncomputed again.
        """
        while self._alive.any() and self._read < self._launched:
            self._take(self.runner.read(), give)
        alive = np.flatnonzero(self._alive)
        grow, self._grow = self._grow, []
        for i, tokens, logprobs in zip(alive.tolist(), *self._sampled(alive), strict=True):
            sequence, run = self.scheduled.rows[i][0], self._sample(i)
            if not self._one_by_one[i]:
                run.accept_all(tokens.tolist(), logprobs.tolist(), ends=False)
            self._grew[i] = self._read
            if self._read == 1:
                grow.append((sequence, int(tokens[0])))
            else:
                self.tree.extend(sequence, tokens)
                self.tree.mark_computed([sequence.node], [sequence.node.length - 1])
        if grow:
            self.tree.extend_each([sequence for sequence, _ in grow], [token for _, token in grow])

    # -- one step, part by part ----------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Launch steps as far ahead as is allowed."""
        if not self._launched:
            self._launch_first()
            self._prepare_to_take()
        if self.scheduled.pipelined:
            last = min(int(self._last[self._alive].max()), self.scheduled.most_steps)
            while self._launched < min(last, self._read + self.runner.pace.ahead):
                self.runner.repeat()
                self._count_step()

    def _launch_first(self) -> None:
        """Launch the first step, or sample from logits that are known."""
        scheduled = self.scheduled
        if scheduled.batch is None:
            assert scheduled.logits is not None, "one of the two is there"
            self._launched = 1
            self._rows_of_steps.append(self._rows)
            self._known = self.runner.sample(scheduled.logits, scheduled.sampling)
            return
        self.runner.launch(scheduled.batch)
        self.tree.mark_computed(scheduled.nodes, scheduled.batch.tree.queries.end)
        self._query_rows, self._counted = len(scheduled.batch.tokens), False
        self._count_step()

    def _take(self, sampled: Sampled, give: Give) -> None:
        """Look at what came of the oldest step that was not read."""
        rows, at = self._rows_of_steps.pop(0), self._read
        if at == len(self._tokens):
            self._tokens = np.vstack((self._tokens, np.zeros_like(self._tokens)))
            self._logprobs = np.vstack((self._logprobs, np.zeros_like(self._logprobs)))
        self._tokens[at, rows], self._logprobs[at, rows] = sampled.tokens, sampled.logprobs
        self._read += 1
        if sampled.prompts is not None:
            for state, logits in zip(self.scheduled.prompts, sampled.prompts, strict=True):
                state.first_logits = logits.clone()  # a view would keep the whole step's logits
        alive = self._alive[rows]
        if len(broken := rows[alive & (sampled.tokens < 0)]):
            raise _broken_logits(self._runs[int(broken[0])])
        if self._last.any():
            self._take_samples(rows, alive, give)
        self._take_beams(sampled, give)
        if self.on_step is not None and alive.any():
            self.on_step(int(alive.sum()))

    def _take_samples(self, rows: NDArray[np.intp], alive: NDArray[np.bool_], give: Give) -> None:
        tokens = self._tokens[self._read - 1, rows]
        ends = (self._stops[rows] == tokens[:, None]).any(axis=1) | (self._last[rows] == self._read)
        one_by_one = alive & self._one_by_one[rows]
        ended = rows[alive & ends & ~one_by_one]
        for i, all_tokens, all_logprobs in zip(ended.tolist(), *self._sampled(ended), strict=True):
            run = self._sample(i)
            self._end(i, run.accept_all(all_tokens.tolist(), all_logprobs.tolist(), ends=True), give)
        for i in rows[one_by_one].tolist():
            run, at = self._sample(i), self._read - 1
            self._end(i, run.accept(int(self._tokens[at, i]), float(self._logprobs[at, i]), self.on_token), give)

    def _take_beams(self, sampled: Sampled, give: Give) -> None:
        """A step of each beam search, which moves its sequences in the tree."""
        if not self._beams:
            return
        self._grow = advance_beams(self.tree, self._beams, sampled.top_tokens, sampled.top_logprobs)
        for run in self._beams:
            if run.search.done:
                give(run, run.samples())

    def _sampled(self, runs: NDArray[np.intp]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """``[runs, steps]`` tokens and logprobs that were read."""
        tokens, logprobs = self._tokens[: self._read, runs], self._logprobs[: self._read, runs]
        return np.ascontiguousarray(tokens.T), np.ascontiguousarray(logprobs.T)

    def _sample(self, i: int) -> SampleRun:
        run = self._runs[i]
        assert isinstance(run, SampleRun), "beams are not alive"
        return run

    def _end(self, i: int, sample: Sample | None, give: Give) -> None:
        if sample is not None:
            self._alive[i] = False
            self._grew[i] = self._read - 1  # the last token never joins the tree
            give(self._runs[i], [sample])

    def _compact(self) -> None:
        """Go on without the rows that have ended, once they are many."""
        alive = self._alive[self._rows]
        ended = len(alive) - int(alive.sum())
        if 0 < ended < len(alive) and ended * self.runner.pace.slack >= len(alive):
            rows = np.flatnonzero(alive)
            self.runner.select_rows(rows)
            self._rows = self._rows[rows]
            self._query_rows, self._counted = len(rows), False

    # -- counting ------------------------------------------------------------------------------------------------------

    def _count_step(self) -> None:
        """A step was launched."""
        if not self._counted:  # while the device is at it
            self._counted, (self._reads, self._alone) = True, self.runner.reads
        grown, rows = self._launched, len(self._rows)
        self._launched += 1
        self._rows_of_steps.append(self._rows)
        self.rows_run += self._query_rows
        self.kv_tokens_read += self._reads
        self.kv_tokens_unshared += self._alone
        alone = self._alone if grown else sum(sequence.length for sequence, _ in self.scheduled.rows)
        self.tokens_alone = max(self.tokens_alone, alone)
        self._reads, self._alone = self._reads + rows, self._alone + rows  # each row's leaf grows


def _stop_table(runs: list[SampleRun | None]) -> NDArray[Any]:
    """``[runs, most]`` the tokens that end each sample, -1 where it has fewer than others."""
    if not any(runs):
        return np.full((len(runs), 1), -1, np.int64)
    stops = [() if run is None else run.params.stop_token_ids or () for run in runs]
    table = np.full((len(runs), max(map(len, stops), default=1)), -1, np.int64)
    for row, tokens in zip(table, stops, strict=True):
        row[: len(tokens)] = tokens
    return table


def _broken_logits(run: SampleRun | BeamRun) -> ValueError:
    """What to raise where logits leave nothing to choose from."""
    what = f"sample {run.index}" if isinstance(run, SampleRun) else "a beam"
    return ValueError(
        f"the logits of {what} of prompt {run.state.request.prompt_index} hold NaN, +inf or no finite value, or leave "
        "float32 under its repetition penalty and temperature, so no token can be sampled; look at what the model, or "
        "the sample's logits processor, computed"
    )
