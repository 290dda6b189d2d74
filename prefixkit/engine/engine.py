"""The loop: schedule, launch, commit."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.engine.call import Call
from prefixkit.engine.head_values import Head, Marked, values
from prefixkit.engine.page_needs import check_fits
from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.request import Request, Sample
from prefixkit.engine.running import RunningBatch
from prefixkit.engine.runs.run_protocol import Run
from prefixkit.engine.scheduler import Scheduler
from prefixkit.engine.score import Score, score
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Runner
from prefixkit.sampling.params import as_integer
from prefixkit.tree.eviction import PrefixCache


class Engine:
    """Samples and searches many sequences over one KV store, a call at a time.

    Args:
        runner: Runs steps, and samples from logits.
        store: Where KV lives; no other call uses it meanwhile.
        prefill_chunk: Prompt tokens that one step computes at most, beside one token for each running sequence.
        most_running: Samples, or beam searches, that run at once at most; the rest wait.
        retain_samples: Whether the KV of finished samples is retained in the prefix cache, as that of prompts is.
        policy: What happens where KV does not fit.

    Raises:
        ValueError, TypeError: one of the numbers is below 1, or no integer.
    """

    def __init__(
        self,
        runner: Runner,
        store: KVStore,
        *,
        prefill_chunk: int = 1024,
        most_running: int = sys.maxsize,
        retain_samples: bool = False,
        policy: MemoryPolicy | None = None,
    ) -> None:
        self.prefill_chunk, self.most_running = checked_limits(prefill_chunk, most_running)
        self.runner, self.store = runner, store
        self.retain_samples, self.policy = retain_samples, MemoryPolicy() if policy is None else policy

    def run(self, requests: Iterable[Request], call: Call | None = None) -> list[Sample]:
        """Run requests to their end and return their samples, if the call does, by prompt, then index.

        Raises:
            KVBudgetTooSmall: some request cannot run even alone; raised before anything starts.
        """
        call = Call() if call is None else call
        finished = [sample for sample in self.stream(requests, call) if call.return_samples]
        return sorted(finished, key=lambda sample: (sample.prompt_index, sample.index))

    def stream(self, requests: Iterable[Request], call: Call | None = None) -> Iterator[Sample]:
        """Run requests to their end, and give each sample as it finishes.

        Raises:
            KVBudgetTooSmall: some request cannot run even alone; raised before anything starts.
        """
        requests = list(requests)
        check_fits(requests, self.store.budget())
        loop = self.loop(Call() if call is None else call)
        try:
            loop.start(requests)
            while not loop.scheduler.idle:
                yield from loop.step()
        except KeyboardInterrupt:
            self.store.restart()  # what it left of the tree may not be fit for releasing
            raise
        finally:
            loop.end()

    def loop(self, call: Call) -> Loop:
        """A call that has not started."""
        return Loop(self, call)

    def score(
        self,
        prompts: Ordered[NDArray[np.int32]],
        continuations: Ordered[Ordered[NDArray[np.int32]]],
        vocab: int,
        call: Call | None = None,
    ) -> list[list[Score]]:
        """The score of each continuation of each prompt; see ``engine/score.py``."""
        with self._reporting(call) as report:
            chunk = self.prefill_chunk
            return score(
                self.runner, self.store, prompts, continuations, prefill_chunk=chunk, vocab=vocab, report=report
            )

    def values(self, marked: Marked, head: Head, call: Call | None = None) -> list[Tensor]:
        """What a head makes of the hidden states at wanted tokens; see ``engine/head_values.py``."""
        with self._reporting(call) as report:
            return values(self.runner, self.store, marked, head, prefill_chunk=self.prefill_chunk, report=report)

    @contextmanager
    def _reporting(self, call: Call | None) -> Iterator[Report]:
        """The report of a call without a loop; after an interrupt the store has a new tree."""
        report, began, cache = (Call() if call is None else call).report, time.perf_counter(), self.store.cache
        self.runner.start_call()
        report.start(lambda: {**counters_of(self.runner), **counters_of_cache(cache)})
        try:
            yield report
        except KeyboardInterrupt:
            self.store.restart()
            raise
        finally:
            report.seconds += time.perf_counter() - began
            report.end()


class Loop:
    """One call over an engine's store, from its requests to their last samples.

    Args:
        engine: Whose runner and store it uses, alone.
        call: What comes with the call.

    Attributes:
        scheduler: What waits and what runs.
    """

    def __init__(self, engine: Engine, call: Call) -> None:
        self.engine, self.call, self.store, self.runner = engine, call, engine.store, engine.runner
        self.scheduler = Scheduler(self.store, call, engine.prefill_chunk, engine.most_running, engine.policy)
        self._tree, self._cache = self.store.tree, self.store.cache  # an interrupt gives the store others
        self._running: RunningBatch | None = None
        self._ended: RunningBatch | None = None  # not yet reported
        self._finished: list[Sample] = []  # by the step under way

    def start(self, requests: list[Request]) -> None:
        """Start the call with requests that :func:`check_fits` has passed."""
        self.runner.start_call()
        self.call.report.start(self._counters)
        self.scheduler.submit(requests)
        self.call.report.prompts += len(requests)

    def step(self) -> list[Sample]:
        """Schedule what runs next if nothing is running, launch, and commit; returns the samples that ended."""
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
        """Give every page back, and end the report; after all requests there is nothing left to give but reserves."""
        if self.store.tree is self._tree:
            self._drop_ended()
            self.scheduler.close()
        self.call.report.graph_bytes = self.runner.graph_bytes
        self.call.report.end()

    def _step(self, running: RunningBatch, began: float) -> None:
        running.launch_ahead()
        self._report_ended()  # while the device is at work
        self.scheduler.compact_in_time()
        running.read(self._finish)
        if running.done(self.scheduler.had_waiting):
            running.commit(self._finish)
            self._running, self._ended = None, running
            self.scheduler.drop_ended()
        seconds = time.perf_counter() - began
        self.scheduler.steps += 1
        if running.decodes:
            self.call.report.seconds_in_decode += seconds
        elif running.steps:
            self.scheduler.preemption.computing.add(running.rows_run, seconds)

    def _finish(self, run: Run, samples: list[Sample]) -> None:
        """Take a run that has ended out of the tree, count its samples, and hand them out."""
        run.leave(self.store, samples, self.engine.retain_samples)
        report = self.call.report
        report.tokens_plain_batch += run.tokens_of_plain_batch(samples)
        report.samples += len(samples)
        report.new_tokens += sum(len(sample.tokens) for sample in samples)
        self.scheduler.finish(run)
        if self.call.return_samples:
            self._finished += samples
        if self.call.on_sample is not None:
            for sample in samples:
                self.call.on_sample(sample)

    def _drop_ended(self) -> None:
        if self._running is not None:
            self._running, self._ended = None, self._running
            self.scheduler.drop_ended()
        self._report_ended()

    def _report_ended(self) -> None:
        """Count the batch that ended last."""
        if self._ended is not None:
            self.call.report.add_batch(self._ended.counts, self.store.pool.spec.bytes_per_token)
            self._ended = None

    def _counters(self) -> dict[str, float]:
        preemption = self.scheduler.preemption
        return {
            **counters_of(self.runner),
            **counters_of_cache(self._cache),
            "preempted_swapped": preemption.swapped,
            "preempted_recomputed": preemption.recomputed,
            "kv_bytes_copied": self.scheduler.bytes_copied,
            "kv_bytes_swapped": preemption.bytes_swapped,
        }


def checked_limits(prefill_chunk: int, most_running: int) -> tuple[int, int]:
    """Both as integers; ValueError, TypeError: one is below 1, or no integer."""
    return (
        as_integer("prefill_chunk", prefill_chunk, 1, "compute at least one token a step"),
        as_integer("most_running", most_running, 1, "let at least one sample run"),
    )


def counters_of(runner: Runner) -> dict[str, float]:
    """Cumulative counters of a runner, by the fields of a report."""
    return {
        "plans": runner.plans_made,
        "graph_steps": runner.graph_steps,
        "captures": runner.captures,
        "seconds_capturing": runner.seconds_capturing,
    }


def counters_of_cache(cache: PrefixCache) -> dict[str, float]:
    """Cumulative counters of a prefix cache, by the fields of a report."""
    return {
        "prompt_tokens": cache.tokens_queried,
        "prompt_tokens_found": cache.tokens_hit,
        "tokens_evicted": cache.tokens_evicted,
    }
