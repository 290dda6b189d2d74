"""The loop: schedule, launch, commit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.preemption import Preemption
from prefixkit.engine.request import Request, Sample, TokenEvent
from prefixkit.engine.run_set import RunSet
from prefixkit.engine.running import RunningBatch
from prefixkit.engine.runs.beam_run import BeamRun
from prefixkit.engine.runs.detokenizer import Detokenizer
from prefixkit.engine.runs.sample_run import SampleRun
from prefixkit.engine.scheduler import RequestState, Scheduler, check_fits
from prefixkit.engine.score import Score, score
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Runner
from prefixkit.sampling.params import as_integer


def checked_limits(prefill_chunk: int, most_running: int) -> tuple[int, int]:
    """Both as integers; ValueError, TypeError: one is below 1, or no integer."""
    return (
        as_integer("prefill_chunk", prefill_chunk, 1, "compute at least one token a step"),
        as_integer("most_running", most_running, 1, "let at least one sample run"),
    )


class Engine:
    """Samples and searches many sequences over one prefix tree.

    Args:
        runner: Runs steps, and samples from logits.
        store: Where KV lives; no other call uses it meanwhile.
        detokenizer: Makes the text of samples; needed for stop strings and ``Sample.text``.
        prefill_chunk: Prompt tokens that one step computes at most, beside one token for each running sequence.
        most_running: Samples, or beam searches, that run at once at most; the rest wait.
        keep_samples: Whether the KV of finished samples stays in the prefix cache, as that of prompts does.
        policy: What happens where KV does not fit.
    """

    def __init__(
        self,
        runner: Runner,
        store: KVStore,
        *,
        detokenizer: Detokenizer | None = None,
        prefill_chunk: int = 1024,
        most_running: int = sys.maxsize,
        keep_samples: bool = False,
        policy: MemoryPolicy | None = None,
    ) -> None:
        self.prefill_chunk, self.most_running = checked_limits(prefill_chunk, most_running)
        self.runner, self.store = runner, store
        self.keep_samples, self.policy = keep_samples, MemoryPolicy() if policy is None else policy
        self.report = Report()
        self.listen()
        self._start(Detokenizer() if detokenizer is None else detokenizer)

    def listen(
        self,
        keep: bool = True,
        on_sample: Callable[[Sample], None] | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        """Say where the samples of the next run go; see :func:`prefixkit.generate`."""
        if on_sample is None and not keep:
            raise ValueError("keep=False drops every sample; pass on_sample to take them, or leave keep out")
        for name, listener in (("on_sample", on_sample), ("on_token", on_token), ("on_step", on_step)):
            if listener is not None and not callable(listener):
                raise TypeError(f"{name} must be a function, got {type(listener).__name__} {listener!r}")
        self.keep, self.on_sample, self.on_token, self.on_step = keep, on_sample, on_token, on_step

    def restart(self) -> None:
        """Start with a new tree: an interrupt may have left this one half changed, and what ran is dropped."""
        self.store.restart()
        self._start(self.runs.detokenizer)

    def _start(self, detokenizer: Detokenizer) -> None:
        self._running: RunningBatch | None = None
        self._ended: RunningBatch | None = None  # not yet reported
        self.preemption = Preemption(self.store, self.policy)
        self.scheduler = Scheduler(self.store, self.most_running, self.policy)
        self.runs = RunSet(self.scheduler, self.preemption, detokenizer, self.prefill_chunk)

    def score(
        self, prompts: Ordered[NDArray[np.int32]], continuations: Ordered[Ordered[NDArray[np.int32]]], vocab: int
    ) -> list[list[Score]]:
        """The score of each continuation of each prompt, while nothing runs; see ``engine/score.py``."""
        self.runner.start_call()
        self.report.begin(self.runner, self.runs)
        began, given = time.perf_counter(), (self.runner, self.store, prompts, continuations)
        try:
            return score(*given, prefill_chunk=self.prefill_chunk, vocab=vocab, report=self.report)
        except KeyboardInterrupt:
            self.restart()
            raise
        finally:
            self.report.seconds += time.perf_counter() - began
            self.report.end()

    def run(self, requests: Iterable[Request]) -> list[Sample]:
        """Run requests to their end and return their samples, if they are kept, by prompt, then index.

        Raises:
            KVBudgetTooSmall: some request cannot run even alone; raised before anything starts.
        """
        finished = [sample for sample in self.stream(requests) if self.keep]
        return sorted(finished, key=lambda sample: (sample.prompt_index, sample.index))

    def stream(self, requests: Iterable[Request]) -> Iterator[Sample]:
        """Run requests to their end, and give each sample as it finishes.

        Raises:
            KVBudgetTooSmall: some request cannot run even alone; raised before anything starts.
        """
        requests = list(requests)
        check_fits(requests, self.store.budget())
        try:
            yield from self._steps(requests)
        except KeyboardInterrupt:
            self.restart()
            raise

    def _steps(self, requests: list[Request]) -> Iterator[Sample]:
        """Step until nothing is left, and give every page back, whatever happens."""
        interrupted = False
        try:
            self.runner.start_call()
            self.report.begin(self.runner, self.runs)
            self.scheduler.submit(requests)
            self.report.prompts += len(requests)
            while not self.scheduler.idle:
                began = time.perf_counter()
                try:
                    finished = self.step()
                finally:
                    self.report.seconds += time.perf_counter() - began
                yield from finished
            self.report.graph_bytes = self.runner.graph_bytes
        except KeyboardInterrupt:
            interrupted = True  # what it left of the tree may not be fit for releasing
            raise
        finally:
            if not interrupted:
                self._release_all()
            self.report.end()

    def step(self) -> list[Sample]:
        """Schedule what runs next if nothing is running, launch, and commit; returns the samples that ended."""
        if self._running is None and (scheduled := self.runs.next()) is not None:
            self._running = RunningBatch(self.store.tree, self.runner, scheduled, self.on_token, self.on_step)
        running, finished, began = self._running, list[Sample](), time.perf_counter()

        def give(run: SampleRun | BeamRun, samples: list[Sample]) -> None:
            if isinstance(run, SampleRun):
                self._leave(run, samples[0])
                rows, steps = 1, len(samples[0].tokens)
            else:
                rows, steps = run.search.params.num_beams, run.steps
            self.report.tokens_plain_batch += rows * (len(run.state.request.tokens) + steps - 1)
            self._finish(run.state, samples)
            finished.extend(samples if self.keep else ())

        if running is not None:
            running.launch()
            self._count()  # while the device is at work
            self.runs.compact_in_time()
            running.take(give)
            if running.done(self.runs.waits):
                running.commit(give)
                self._end(running)
            seconds = time.perf_counter() - began
            self.scheduler.steps += 1
            if running.decodes:
                self.report.seconds_in_decode += seconds
            elif running.steps:
                self.preemption.computing.add(running.rows_run, seconds)
        return finished

    def _leave(self, run: SampleRun, sample: Sample) -> None:
        """Take a finished sample's sequence out of the tree; its KV may stay in the prefix cache."""
        sequence = run.sequence
        if not self.keep_samples:
            return self.store.tree.release(sequence)
        known = sequence.length - len(run.state.request.tokens)
        if more := sample.tokens[known:-1]:
            self.store.tree.extend(sequence, more)
        self.store.tree.mark_computed([sequence.node], [sequence.node.length])
        self.store.retain(sequence)

    def _finish(self, state: RequestState, samples: list[Sample]) -> None:
        """Count samples that have ended, retire their request after the last, and hand them out."""
        state.finished += 1
        state.running -= 1
        self.report.samples += len(samples)
        for sample in samples:
            self.report.new_tokens += len(sample.tokens)
        if state.finished == state.wanted:
            self.scheduler.retire(state)
        if self.on_sample is not None:
            for sample in samples:
                self.on_sample(sample)

    def _end(self, running: RunningBatch) -> None:
        """The tree holds the batch's tokens: forget what has ended."""
        self._running, self._ended = None, running
        self.runs.drop_ended()

    def _count(self) -> None:
        """Report the batch that ended last."""
        if self._ended is not None:
            self.report.count(self._ended, self.store.pool.spec.bytes_per_token)
            self._ended = None

    def _release_all(self) -> None:
        """Give every page back; after a run to the end there is nothing left to give but the tree's own."""
        if self._running is not None:
            self._end(self._running)
        self._count()
        self.runs.clear()
