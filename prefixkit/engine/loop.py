"""The loop: schedule, launch, commit."""

from __future__ import annotations

import time

from prefixkit.engine.call import Call
from prefixkit.engine.request import Request, Sample, token_count
from prefixkit.engine.running import RunningBatch
from prefixkit.engine.runs.run_protocol import Run
from prefixkit.engine.scheduler import Scheduler
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Runner
from prefixkit.tree.eviction import PrefixCache


class Loop:
    """One call over a KV store that it uses alone, from its requests to their last samples."""

    def __init__(self, runner: Runner, store: KVStore, scheduler: Scheduler, call: Call) -> None:
        self.runner, self.store, self.scheduler, self.call = runner, store, scheduler, call
        self._tree, self._cache = self.store.tree, self.store.cache  # an interrupt replaces those of the store
        self._running: RunningBatch | None = None
        self._ended: RunningBatch | None = None  # not yet reported
        self._finished: list[Sample] = []  # samples that the step under way has finished

    def start(self, requests: list[Request]) -> None:
        """Start the call with requests that :func:`check_fits` has passed."""
        self.call.report.start(self._counters)
        self.scheduler.submit(requests)
        self.call.report.prompts += len(requests)

    def step(self) -> list[Sample]:
        """Schedule a batch if none is running, launch, and commit; returns the samples that ended."""
        began, self._finished = time.perf_counter(), []
        try:
            if self._running is None and (scheduled := self.scheduler.next()) is not None:
                self._running = RunningBatch(self._tree, self.runner, scheduled, self.call)
            if self._running is not None:
                self._step(self._running, began)
        finally:
            self.call.report.seconds += time.perf_counter() - began
        return self._finished

    def end(self) -> None:
        """Release all pages, and end the report; once all requests have ended only reserved pages are left."""
        if self.store.tree is self._tree:
            self._ended = self._running or self._ended
            self._running = None
            self._report_ended()
            self.scheduler.close()
        self.call.report.graph_bytes = self.runner.graph_bytes
        self.call.report.end()

    def _step(self, running: RunningBatch, began: float) -> None:
        running.launch_ahead()
        self._report_ended()  # while the device is at work
        if running.forks:
            self.scheduler.compact_in_time()
        running.read(self._finish)
        if self.scheduler.had_waiting:
            self.scheduler.start_ahead(running.scheduled)
        if running.done(self.scheduler.had_waiting):
            self._commit(running)
        seconds = time.perf_counter() - began
        self.scheduler.steps += 1
        if running.decodes:
            self.call.report.seconds_in_decode += seconds
        else:
            self.scheduler.preemption.count_step(running.rows_run, seconds, waited=bool(running.scheduled.rows))

    def _commit(self, running: RunningBatch) -> None:
        """Read the steps under way, and append their tokens, and first tokens of runs started ahead, to the tree."""
        running.read_all(self._finish)
        self.scheduler.start_ahead(running.scheduled)
        running.commit()
        if (held := self.store.held) is not None:
            for run in self.scheduler.runs:  # all of them are samples
                held.release(self._tree, run.sequences[0])
        self._running, self._ended = None, running
        if (started := self.scheduler.pop_started()) is not None:
            first = RunningBatch(self._tree, self.runner, started, self.call)
            first.read(self._finish)
            first.commit()

    def _finish(self, run: Run, samples: list[Sample]) -> None:
        """Remove a run that has ended from the tree, count its samples, and hand them out."""
        run.leave(self.store, samples, self.scheduler.settings.retain_samples)
        report = self.call.report
        report.tokens_plain_batch += run.tokens_of_plain_batch(samples)
        report.samples += len(samples)
        report.new_tokens += sum(map(token_count, samples))
        self.scheduler.finish(run)
        if self.call.return_samples:
            self._finished += samples
        if self.call.on_sample is not None:
            for sample in samples:
                self.call.on_sample(sample)

    def _report_ended(self) -> None:
        if self._ended is not None:
            self.call.report.add(self._ended.counts(self.store.pool.spec))
            self._ended = None

    def _counters(self) -> dict[str, float]:
        preemption = self.scheduler.preemption
        return {
            **self.runner.counters(),
            **counters_of_cache(self._cache),
            "preempted_swapped": preemption.swapped,
            "preempted_recomputed": preemption.recomputed,
            "kv_bytes_copied": self.scheduler.bytes_copied,
            "kv_bytes_swapped": preemption.bytes_swapped,
        }


def counters_of_cache(cache: PrefixCache) -> dict[str, float]:
    """Cumulative counters of a prefix cache, keyed by field of the report."""
    return {
        "prompt_tokens": cache.tokens_queried,
        "prompt_tokens_found": cache.tokens_hit,
        "tokens_evicted": cache.tokens_evicted,
    }
