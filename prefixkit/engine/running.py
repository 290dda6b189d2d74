"""The batch that a runner runs, from the launch of its first step until the tree holds its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.call import Call
from prefixkit.engine.next_step import Scheduled
from prefixkit.engine.request import Sample
from prefixkit.engine.runs.run_protocol import Run, SteppedRun, StreamingRun, is_stepped, is_streaming
from prefixkit.engine.runs.stop_filter import MET, StopFilter
from prefixkit.kv.kv_pool import KVSpec
from prefixkit.runners.batch import Results, Runner, launch_step
from prefixkit.tree.radix import PrefixTree, Sequence

# Called with a run that has ended, and its samples.
Finish = Callable[[Run, list[Sample]], None]


class RunningBatch:
    """Runs the scheduled rows, reads the results, and commits them to the tree.

    A batch of streaming runs alone is pipelined: steps are launched before earlier tokens are read, over leaves that
    have reserved the pages of all their later tokens.  Until :meth:`commit` appends the tokens of runs that continue,
    only runs that end change the tree.  A run that has ended keeps its row, unread, until rows are compacted; the row
    writes to the run's former pages, which no other sequence gets before then.  Any other batch is committed after one
    step.

    The first step is launched when the batch is made.  ``steps`` counts launched steps, ``rows_run`` their query rows.
    """

    def __init__(self, tree: PrefixTree, runner: Runner, scheduled: Scheduled, call: Call) -> None:
        self.tree, self.runner, self.scheduled, self.call = tree, runner, scheduled, call
        # Where logits are known, the step that computed them has counted the pages held.
        self._held = 0 if scheduled.batch is None else tree.pages_held()
        self._runs = [run for _, run in scheduled.rows]
        self._rows = np.arange(len(self._runs))  # index of the run of each row of the runner
        self._rows_of_steps: list[NDArray[np.intp]] = []  # the same for each step not read yet
        self._known: Results | None = None  # results of sampling from known logits
        self._launched = self._read = self.rows_run = self._kv_tokens_read = self._kv_tokens_unshared = 0
        self._tokens_unshared = 0  # KV tokens that the sequences would have held unshared, at their peak
        self._launch_first()
        self._states = 0 if scheduled.batch is None else tree.states_held()  # each is updated in its slot from here on
        # The host makes the rest while the device runs the step.
        self._streaming = {row: run for row, run in enumerate(self._runs) if is_streaming(run)}
        self._stepped = _stepped(scheduled)
        self._end_slot = np.array([sequence.node.end_slot for sequence, _ in scheduled.rows], np.int64)
        self._grew = np.zeros(len(self._runs), np.int64)  # tokens that each run has added to its leaf
        streaming, rows = [*self._streaming.values()], [*self._streaming]
        self._last, self._stop_row = np.zeros((2, len(self._runs)), np.int64)  # most steps of each; its row of _stops
        self._last[rows] = [1 + run.tokens_left for run in streaming]
        self._stops, self._stop_row[rows] = _stop_table(streaming)
        self._filters = self._stop_filters() if call.on_token is None else []
        self._stop_state = np.zeros(len(self._runs), np.int32)
        self._stop_state[rows] = [run.stop_state for run in streaming]
        self._by_token, self._alive = np.zeros((2, len(self._runs)), np.bool_)
        self._by_token[rows] = [call.on_token is not None or run.by_token for run in streaming]
        self._alive[rows] = True
        self._not_streaming = ~self._alive
        self._accepted = np.zeros(len(self._runs), np.int64)  # tokens that each run has accepted
        # One row per step, since a step writes one: one row per run would put each token in a cache line of its own.
        shape = 64 if scheduled.pipelined else 1, len(self._runs)
        self._drawn = np.array([params.drawn for params in scheduled.sampling.batch.params], np.bool_)
        self._tokens, self._likely = np.zeros(shape, np.int32), np.zeros((*shape, 1 + self._drawn.any()), np.float32)
        self._extend: list[tuple[Sequence, int]] = []  # next tokens of runs that do not stream

    @property
    def forks(self) -> bool:
        """Whether some runs do not stream, but fork and release their sequences in the tree at each step."""
        return bool(self._stepped)

    @property
    def steps(self) -> int:
        return 0 if self.scheduled.batch is None else self._launched

    @property
    def decodes(self) -> bool:
        """Whether its steps run no prompt tokens."""
        return self.scheduled.batch is not None and self.scheduled.batch.decodes

    def counts(self, spec: KVSpec) -> dict[str, Any]:
        """What the report counts of the batch, once it has ended."""
        size, end, bytes_per_token = self.tree.page_size, self._end_slot, spec.bytes_per_token
        # Pages held as if no run had ended, without reserved pages.
        pages = self._held + int((-(-(end + self._grew) // size) - -(-end // size)).sum())
        decode_steps = self.steps if self.decodes else 0
        reasons = {run.unpipelined for run in self._runs if run.unpipelined is not None} if decode_steps else ()
        return {
            "steps": self.steps,
            "decode_steps": decode_steps,
            "unpipelined": dict.fromkeys(reasons, decode_steps),
            "tokens_computed": self.rows_run,
            "kv_bytes_read": self._kv_tokens_read * bytes_per_token,
            "kv_bytes_read_unshared": self._kv_tokens_unshared * bytes_per_token,
            "kv_bytes_held_peak": pages * size * bytes_per_token,
            "kv_bytes_unshared_peak": self._tokens_unshared * bytes_per_token,
            "state_bytes_held_peak": self._states * spec.bytes_per_state,
            "bytes_per_state": spec.bytes_per_state,
        }

    def done(self, has_waiting: bool) -> bool:
        """Whether to commit now: no steps are left, or waiting requests may be admitted."""
        ended = len(self._alive) - int(self._alive.sum())
        if not self.scheduled.pipelined or ended == len(self._alive) or self._launched >= self.scheduled.most_steps:
            return True
        return has_waiting and self.runner.pace.makes_way(ended, len(self._alive))

    # -- launching -----------------------------------------------------------------------------------------------------

    def launch_ahead(self) -> None:
        """Launch as many steps ahead of those read as the runner's pace allows."""
        if self.scheduled.pipelined:
            last = min(int(self._last[self._alive].max()), self.scheduled.most_steps)
            while self._launched < min(last, self._read + self.runner.pace.ahead):
                self.runner.repeat()
                self._count_step()

    def _launch_first(self) -> None:
        """Launch the first step, or sample from known logits."""
        scheduled = self.scheduled
        if scheduled.batch is None:
            assert scheduled.logits is not None, "one of the two is there"
            self._launched = 1
            self._rows_of_steps.append(self._rows)
            self._known = self.runner.sample(scheduled.logits, scheduled.sampling)
            return
        launch_step(self.runner, self.tree, scheduled.batch, scheduled.nodes)
        self._query_rows, self._counted = len(scheduled.batch.tokens), False
        self._count_step()

    def _count_step(self) -> None:
        """Count a step that was launched."""
        if not self._counted or self.runner.sees_part:  # while the device runs the step
            self._counted, (self._reads, self._alone) = True, self.runner.reads
        grown, rows = self._launched, len(self._rows)
        self._launched += 1
        self._rows_of_steps.append(self._rows)
        self.rows_run += self._query_rows
        self._kv_tokens_read += self._reads
        self._kv_tokens_unshared += self._alone
        alone = self._alone if grown else sum(sequence.length for sequence, _ in self.scheduled.rows)
        self._tokens_unshared = max(self._tokens_unshared, alone)
        self._reads, self._alone = self._reads + rows, self._alone + rows  # each row's leaf grows

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, finish: Finish) -> None:
        """Read the oldest unread step; ``finish`` releases the runs that have ended."""
        results, self._known = self._known, None
        self._accept(self.runner.read() if results is None else results, finish)
        if self.scheduled.pipelined:
            self._compact_rows()

    def read_all(self, finish: Finish) -> None:
        """Read all steps under way, unless all runs have ended."""
        while self._alive.any() and self._read < self._launched:
            self._accept(self.runner.read(), finish)

    def commit(self) -> None:
        """Append the tokens of the sequences that continue to the tree; the last token of each is uncomputed."""
        alive = np.flatnonzero(self._alive)
        self._grew[alive] = self._read
        tokens = np.ascontiguousarray(self._tokens[: self._read, alive].T)
        columns = alive.tolist(), self._accepted[alive].tolist(), self._stop_state[alive].tolist()
        for i, held, state, own in zip(*columns, tokens.tolist(), strict=True):
            if held < len(own):
                self._streaming[i].hold(own[held:], self._likely[held : self._read, i], state)
        sequences = [self.scheduled.rows[i][0] for i in columns[0]]
        if self._read > 1:
            self.tree.extend_leaves(sequences, tokens)
        elif sequences or self._extend:
            sequences += [sequence for sequence, _ in self._extend]
            self.tree.extend_each(sequences, [*tokens[:, 0].tolist(), *(token for _, token in self._extend)])
        self._extend = []

    def _accept(self, results: Results, finish: Finish) -> None:
        """Pass the results of the oldest unread step to their runs."""
        rows, at = self._rows_of_steps.pop(0), self._read
        if at == len(self._tokens):
            self._tokens = np.vstack((self._tokens, np.zeros_like(self._tokens)))
            self._likely = np.vstack((self._likely, np.zeros_like(self._likely)))
        self._tokens[at, rows], self._likely[at, rows] = results.tokens, results.likely(self._drawn[rows])
        self._read += 1
        if results.logits is not None:
            for state, logits in zip(self.scheduled.prompts, results.logits, strict=True):
                state.first_logits = logits.clone()  # a view would keep the whole step's logits
        alive = self._alive[rows]
        if self.tree.states is not None:  # with launches ahead, rows run on after they end
            self.tree.states.ahead = self.runner.pace.ahead > 1
        read = alive | self._not_streaming[rows]
        if len(broken := rows[read & (results.tokens < 0) & ~np.isneginf(results.logprobs)]):
            raise _broken_logits(self._runs[int(broken[0])])
        if self._streaming:
            self._accept_tokens(rows, alive, finish)
        self._extend = []
        for kind, own in self._stepped.items():
            self._extend += kind.advance(self.tree, own, results)
            for run in own:
                if run.done:
                    finish(run, run.samples())
        if self.call.on_step is not None and alive.any():
            self.call.on_step(int((alive & (results.tokens >= 0)).sum()))

    def _accept_tokens(self, rows: NDArray[np.intp], alive: NDArray[np.bool_], finish: Finish) -> None:
        """Pass a step's tokens to the streaming runs that may have ended, and to those that look at each token."""
        tokens = self._tokens[self._read - 1, rows]
        asked = (self._stops[self._stop_row[rows]] == tokens[:, None]).any(axis=1) | (self._last[rows] == self._read)
        asked |= self._by_token[rows] | (tokens < 0)  # no token that the grammar allows could be sampled
        asked &= alive
        for stop_filter, theirs in self._filters:
            followed = np.flatnonzero(alive & theirs[rows] & (tokens >= 0))
            states = stop_filter.advance(self._stop_state[rows[followed]], tokens[followed])
            self._stop_state[rows[followed]] = states
            asked[followed[states == MET]] = True
        which = rows[asked]
        accepted = self._accepted[which]
        new = slice(int(accepted.min(initial=self._read)), self._read)
        # Copied, so that a run's numbers are adjacent: else each would be read from a cache line of its own.
        parts = self._tokens[new, which].T.tolist(), self._likely[new, which].swapaxes(0, 1).copy()
        for i, begin, own, likely in zip(which.tolist(), (accepted - new.start).tolist(), *parts, strict=True):
            own, likely, run = own[begin:], likely[begin:], self._streaming[i]
            self._accepted[i] = self._read
            ran_out = own[-1] < 0
            accept = run.run_out if ran_out else run.accept
            if (sample := accept(own[: -1 if ran_out else None], likely, self.call.on_token)) is not None:
                self._alive[i] = False
                self._grew[i] = self._read - 1  # the last token never joins the tree
                finish(self._streaming[i], [sample])
            if self._stop_state[i] == MET:  # if it continues, its text is not its tokens' bytes
                self._by_token[i], self._stop_state[i] = True, 0

    def _stop_filters(self) -> list[tuple[StopFilter, NDArray[np.bool_]]]:
        """Each stop filter, and ``[runs]`` bool, whether it follows the run."""
        own = {row: run.stop_filter for row, run in self._streaming.items() if run.stop_filter is not None}
        found = {id(one): (one, np.zeros(len(self._runs), np.bool_)) for one in own.values()}
        for row, one in own.items():
            found[id(one)][1][row] = True
        return list(found.values())

    def _compact_rows(self) -> None:
        """Remove the rows that have ended from the batch, once there are many."""
        alive = self._alive[self._rows]
        ended = len(alive) - int(alive.sum())
        if 0 < ended < len(alive) and ended * self.runner.pace.slack >= len(alive):
            rows = np.flatnonzero(alive)
            self.runner.select_rows(rows)
            self._rows = self._rows[rows]
            self._query_rows, self._counted = len(rows), False


def _stepped(scheduled: Scheduled) -> dict[type[SteppedRun], dict[SteppedRun, list[int]]]:
    """The runs that do not stream, by kind, each with the rows of its sequences, in order."""
    runs = dict.fromkeys(run for _, run in scheduled.rows if is_stepped(run))
    found: dict[type[SteppedRun], dict[SteppedRun, list[int]]] = {}
    if runs:
        row_of = {sequence: row for row, (sequence, _) in enumerate(scheduled.rows)}
        for run in runs:
            found.setdefault(type(run), {})[run] = [row_of[sequence] for sequence in run.sequences]
    return found


def _stop_table(streaming: list[StreamingRun]) -> tuple[NDArray[np.int64], list[int]]:
    """``[lists, most]`` the distinct lists of stop tokens, padded with -1, and the index of each run's list."""
    lists: dict[tuple[int, ...], int] = {}
    of_each = [lists.setdefault(run.stop_token_ids, len(lists)) for run in streaming]
    table = np.full((max(len(lists), 1), max(map(len, lists), default=1)), -1, np.int64)
    for row, tokens in zip(table, lists, strict=False):
        row[: len(tokens)] = tokens
    return table, of_each


def _broken_logits(run: Run) -> ValueError:
    """The error for logits from which no token can be sampled."""
    return ValueError(
        f"the logits of {run.name} of prompt {run.state.request.prompt_index} hold NaN, +inf or no finite value, or "
        "leave float32 under its repetition penalty and temperature, so no token can be sampled; look at what the "
        "model, or the sample's logits processor, computed"
    )
