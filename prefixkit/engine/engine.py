"""The loop: schedule, launch, commit."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.batch import Row, Scheduled, first_tokens, next_step
from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.preemption import Preemption, Run
from prefixkit.engine.report import Report
from prefixkit.engine.request import Request, Sample, TokenEvent
from prefixkit.engine.running import RunningBatch
from prefixkit.engine.runs.beam_run import BeamRun
from prefixkit.engine.runs.sample_run import SampleRun
from prefixkit.engine.scheduler import RequestState, Scheduler, check_fits
from prefixkit.engine.score import Score, score
from prefixkit.ops.kv_pool import KVPool
from prefixkit.runners.batch import Runner
from prefixkit.sampling.params import SamplingParams, as_integer
from prefixkit.tree.eviction import POLICIES, PrefixCache
from prefixkit.tree.radix import PrefixTree, Sequence

log = logging.getLogger("prefixkit")

COMPACT_EVERY = 16  # steps of beams: in so many the tree of a search gets about five nodes deeper


class Engine:
    """Samples and searches many sequences over one prefix tree.

    Args:
        runner: Runs steps, and samples from logits.
        pool: Where KV lives; its pages are those of ``tree``.
        tree: An empty tree over the pool's pages.
        decode: Token ids to text; needed for stop strings and ``Sample.text``.
        special_tokens: The text of tokens that ``decode`` leaves out, by their ids; see ``StopChecker``.
        prefill_chunk: Prompt tokens that one step computes at most, beside one token for each running sequence.
        most_running: Samples, or beam searches, that run at once at most; the rest wait.
        keep_samples: Whether the KV of finished samples stays in the prefix cache, as that of prompts does.
        policy: What happens where KV does not fit.

    Attributes:
        cache: KV of finished requests, which stays in the tree until its pages are needed.
    """

    def __init__(
        self,
        runner: Runner,
        pool: KVPool,
        tree: PrefixTree,
        *,
        decode: Callable[[list[int]], str] | None = None,
        special_tokens: Mapping[int, str] | None = None,
        prefill_chunk: int = 1024,
        most_running: int = sys.maxsize,
        keep_samples: bool = False,
        policy: MemoryPolicy | None = None,
    ) -> None:
        self.prefill_chunk = as_integer("prefill_chunk", prefill_chunk, 1, "compute at least one token a step")
        self.most_running = as_integer("most_running", most_running, 1, "let at least one sample run")
        self.runner, self.pool = runner, pool
        self.keep_samples, self.policy = keep_samples, MemoryPolicy() if policy is None else policy
        self.decode = decode
        self.special_tokens = special_tokens or {}
        self.report = Report()
        self.listen()
        self._plant(tree)

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

    def _plant(self, tree: PrefixTree) -> None:
        """Begin with an empty tree, and nothing that runs."""
        self.tree = tree
        self.samples: list[SampleRun] = []
        self.beams: list[BeamRun] = []
        self._running: RunningBatch | None = None
        self._ended: RunningBatch | None = None  # not yet reported
        self.cache = PrefixCache(tree, POLICIES[self.policy.eviction])
        self.preemption = Preemption(self.cache, self.pool, self.policy)
        self.scheduler = Scheduler(tree, self.cache, self.most_running, self.policy)
        self._waits = False
        self._pinned: list[Sequence] = []

    def pin(self, tokens: NDArray[np.int32]) -> Sequence:
        """Keep the KV of tokens that were just computed until the sequence that this returns is released."""
        sequence = self.tree.insert(tokens)
        self.tree.rest(sequence)
        self._pinned.append(sequence)
        return sequence

    @property
    def pinned_pages(self) -> int:
        """Pages that pinned tokens hold."""
        self._pinned = [sequence for sequence in self._pinned if sequence.tree is not None]
        slots = [sequence.slots() // self.tree.page_size for sequence in self._pinned]
        return len(np.unique(np.concatenate(slots))) if slots else 0

    def forget(self) -> None:
        """The model computes something else from now on: no KV of before is used again."""
        self.cache.clear()
        self.tree.forget()

    def check_fits(self, requests: Iterable[Request]) -> None:
        """Raise KVBudgetTooSmall if some request cannot run to its end even alone."""
        check_fits(requests, self.tree, self.pool.spec.bytes_per_token, self.pinned_pages, self._pinned)

    def score(
        self, prompts: Ordered[NDArray[np.int32]], continuations: Ordered[Ordered[NDArray[np.int32]]], vocab: int
    ) -> list[list[Score]]:
        """The score of each continuation of each prompt, while nothing runs; see :func:`prefixkit.engine.score.score`."""
        self.runner.begin()
        self.report.begin(self.runner, self.cache, self.preemption)
        began, given = time.perf_counter(), (self.runner, self.pool, self.cache, prompts, continuations)
        try:
            return score(*given, prefill_chunk=self.prefill_chunk, vocab=vocab, report=self.report)
        except KeyboardInterrupt:
            self._plant(PrefixTree(self.tree.allocator.num_pages, self.tree.page_size))
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
        self.check_fits(requests)
        self.runner.begin()
        self.report.begin(self.runner, self.cache, self.preemption)
        self.scheduler.submit(requests)
        self.report.prompts += len(requests)
        try:
            yield from self._steps()
        except KeyboardInterrupt:
            # It comes anywhere, in the midst of a change of the tree too: what the cache kept is computed again.
            self._plant(PrefixTree(self.tree.allocator.num_pages, self.tree.page_size))
            raise

    def _steps(self) -> Iterator[Sample]:
        """Step until nothing is left, and give every page back, whatever happens."""
        interrupted = False
        try:
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
        if self._running is None:
            self._running = self._schedule()
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
            if self.beams and self.beams[0].steps % COMPACT_EVERY == COMPACT_EVERY - 1:
                self._compact(max(0, self.tree.allocator.free - self._growth(self.policy.shortest)))
            running.take(give)
            if running.done(self._waits):
                running.commit(give)
                self._end(running)
            seconds = time.perf_counter() - began
            self.scheduler.steps += 1
            if running.decodes:
                self.report.seconds_in_decode += seconds
            elif running.steps:
                self.preemption.computing.add(running.rows_run, seconds)
        return finished

    def _schedule(self) -> RunningBatch | None:
        """First tokens of what can start now; else a step."""
        scheduled = self._next()
        if scheduled is None and not self.scheduler.idle:
            # Nothing runs, and what is in flight does not fit: nodes that do not end with a page take more than one.
            for state in self.scheduler.in_flight.copy():
                self.scheduler.put_back(state)
            self.cache.clear()
            scheduled = self._next()
            assert scheduled is not None, "a request that passed check_fits must fit an empty pool"
        self._waits = self.scheduler.waits
        if scheduled is None:
            return None
        return RunningBatch(self.tree, self.runner, scheduled, self.on_token, self.on_step)

    def _next(self) -> Scheduled | None:
        """What runs next: what has been running goes on, or is preempted; what waits is admitted beside it."""
        self._go_on()
        self._make_room()
        if self._waits or self.scheduler.waits:
            growth = self._growth(self.policy.longest)
            self.scheduler.admit(growth)
            begun = self._start(growth)
            if begun:
                return first_tokens(begun)
            self._go_on()  # what was copied back has all its KV
        rows: list[Row] = [(run.sequence, run) for run in self.samples if not run.restores]
        rows += [(sequence, run) for run in self.beams if not run.restores for sequence in run.sequences]
        asking = [state for state in self.scheduler.in_flight if state.wants_logits]
        prompts = (state.sequence.node for state in self.scheduler.in_flight)
        computing = any(run.restores for run in self._runs) or any(node.computed < node.length for node in prompts)
        return next_step(self.tree, rows, asking, self.prefill_chunk, computing)

    @property
    def _runs(self) -> list[Run]:
        """What runs, in the order in which it started."""
        return [*self.samples, *self.beams]

    def _growth(self, tokens: int) -> int:
        """Pages that what runs may take with its next tokens."""
        return sum(run.growth(self.tree, tokens) for run in self._runs)

    def _go_on(self) -> None:
        """Let restored sequences go on whose tokens all have KV again."""
        for run in self._runs:
            if run.restores and all(one.node.computed == one.node.length for one in run.sequences):
                last = [tokens[-1] for tokens in run.token_lists]
                if self.cache.make_room(sum(self.tree.pages_to_extend(one, 1) for one in run.sequences)):
                    self.tree.extend_each(run.sequences, last)
                    run.restores = False

    def _make_room(self) -> None:
        """Preempt until what runs can go on for some steps."""
        runs = len(self.samples) + sum(len(run.sequences) for run in self.beams)
        if runs * (1 + self.policy.shortest // self.tree.page_size) * 2 <= self.tree.allocator.free:
            return
        while self.samples or self.beams:
            if self._waits:  # what waits may go first
                self._give_back_reserved()
            if self.cache.make_room(self._growth(self.policy.shortest)):
                return
            free = self.tree.allocator.free
            self._compact(free)
            if self.tree.allocator.free <= free:
                self._preempt()

    def _give_back_reserved(self) -> None:
        leaves = [run.sequence for run in self.samples if run.sequence.node.reserved]
        self.tree.reserve(leaves, [0] * len(leaves))

    def _preempt(self) -> None:
        """Take the samples of the request admitted last out of the tree; of one that is alone, half of them."""
        last = min(reversed(self.scheduler.in_flight), key=lambda state: state.request.priority)
        runs = [run for run in self._runs if run.state is last]
        alone = len(self.scheduler.in_flight) == 1
        chosen = runs[len(runs) // 2 :] if alone else runs
        if len(chosen) == len(runs):
            self.scheduler.put_back(last)  # first, so that none but these runs hold its prompt
        if chosen:
            self.preemption.suspend(chosen)
        last.suspended = [*chosen, *last.suspended]
        last.running -= len(chosen)
        gone = set(chosen)
        self.samples = [run for run in self.samples if run not in gone]
        self.beams = [run for run in self.beams if run not in gone]
        self._waits = True

    def _start(self, growth: int) -> list[Row]:
        """Bring suspended runs back, and fork new ones from prompts with known logits, as far as there are pages.

        Args:
            growth: Pages that what runs already may take with its next tokens.

        Returns:
            The new ones.
        """
        begun: list[Row] = []
        places = self.scheduler.places
        growth += self.scheduler.growth()
        for state in self.scheduler.in_flight:
            while places > 0 and state.ready:
                unit = self.scheduler.unit(state)
                more = unit if state.running else 0  # for the first of a request it is counted
                if state.suspended:
                    run = state.suspended[0]
                    beside = growth - (0 if state.running else unit)
                    if not self.preemption.resume(run, beside, self.scheduler.growth_back(state)):
                        return begun
                    del state.suspended[0]
                    (self.samples if isinstance(run, SampleRun) else self.beams).append(run)
                elif self.cache.make_room(growth + more):
                    begun.append(self._begin(state))
                else:
                    return begun
                places, growth, state.running = places - 1, growth + more, state.running + 1
        return begun

    def _begin(self, state: RequestState) -> Row:
        """Fork the next sample, or beam search, of a prompt whose logits are known."""
        if isinstance(state.request.params, SamplingParams):
            index = state.request.sample_indices[state.started]
            run = SampleRun.begin(state, index, self.tree, self.decode, self.special_tokens)
            self.samples.append(run)
            row: Row = run.sequence, run
        else:
            search = BeamRun.begin(state, self.tree.fork(state.sequence)[0], self.decode)
            self.beams.append(search)
            row = search.sequences[0], search
        state.started += 1
        return row

    def _leave(self, run: SampleRun, sample: Sample) -> None:
        """Take a finished sample's sequence out of the tree; its KV may stay in the prefix cache."""
        sequence = run.sequence
        if not self.keep_samples:
            return self.tree.release(sequence)
        known = sequence.length - len(run.state.request.tokens)
        if more := sample.tokens[known:-1]:
            self.tree.extend(sequence, more)
        self.tree.mark_computed([sequence.node], [sequence.node.length])
        self.cache.keep(sequence)

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
        self.samples = [run for run in self.samples if run.sequence.tree is not None]
        self.beams = [run for run in self.beams if not run.search.done]

    def _compact(self, most_pages: int) -> None:
        """Make the tree of beams less deep, with so many free pages at most.

        The step under way reads what is copied where it was: the copies wait for it on the device's stream.
        """
        if self.beams:
            source, target = self.tree.compact(most_pages)
            self.pool.copy(source, target)
            self.report.kv_bytes_copied += len(source) * self.pool.spec.bytes_per_token

    def _count(self) -> None:
        """Report the batch that ended last."""
        if self._ended is not None:
            self.report.count(self._ended, self.pool.spec.bytes_per_token)
            self._ended = None

    def _release_all(self) -> None:
        """Give every page back; after a run to the end there is nothing left to give but the tree's own."""
        if self._running is not None:
            self._end(self._running)
        self._count()
        left = [run.sequence for run in self.samples] + [one for run in self.beams for one in run.sequences]
        for sequence in left:
            if sequence.tree is not None:  # a step that failed may have released it
                self.tree.release(sequence)
        self.samples, self.beams = [], []
        self.scheduler.close()
        self.preemption.forget()
