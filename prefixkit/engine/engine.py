"""The loop: schedule, launch, commit."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

from prefixkit.engine.batch import Row, first_tokens, next_step
from prefixkit.engine.beam_run import BeamRun
from prefixkit.engine.report import Report
from prefixkit.engine.request import Request, Sample, TokenEvent
from prefixkit.engine.running import RunningBatch
from prefixkit.engine.sample_run import SampleRun
from prefixkit.engine.scheduler import RequestState, Scheduler, check_fits
from prefixkit.ops.kv_pool import KVPool
from prefixkit.runners.batch import Runner
from prefixkit.sampling.params import SamplingParams
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
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1 token, got {prefill_chunk}")
        if most_running < 1:
            raise ValueError(f"most_running must be at least 1 sample, got {most_running}")
        self.runner, self.pool, self.most_running = runner, pool, most_running
        self.decode = decode
        self.special_tokens = special_tokens or {}
        self.prefill_chunk = prefill_chunk
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
        self.keep, self.on_sample, self.on_token, self.on_step = keep, on_sample, on_token, on_step

    def _plant(self, tree: PrefixTree) -> None:
        """Begin with an empty tree, and nothing that runs."""
        self.tree = tree
        self.samples: list[SampleRun] = []
        self.beams: list[BeamRun] = []
        self._running: RunningBatch | None = None
        self._ended: RunningBatch | None = None  # not yet reported
        # Weakly, for else the two would hold each other, and with them the pool, until Python looks for such cycles.
        reserved, tokens_left = weakref.WeakMethod(self._reserved_pages), weakref.WeakMethod(self._tokens_left)
        self.scheduler = Scheduler(
            tree,
            lambda: reserved()(),  # type: ignore[misc]
            self.most_running,
            lambda one: tokens_left()(one),  # type: ignore[misc]
        )

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
        check_fits(requests, self.tree, self.pool.spec.bytes_per_token)
        self.runner.begin()
        self.report.begin(self.runner)
        self.scheduler.submit(requests)
        self.report.prompts += len(requests)
        try:
            yield from self._steps()
        except KeyboardInterrupt:
            # It comes anywhere, in the midst of a change of the tree too.  KV outlives no call, so nothing is lost.
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

    def step(self) -> list[Sample]:
        """Schedule what runs next if nothing is running, launch, and commit; returns the samples that ended."""
        if self._running is None:
            self.scheduler.admit()
            self._running = self._schedule()
        running, finished, began = self._running, list[Sample](), time.perf_counter()

        def give(run: SampleRun | BeamRun, samples: list[Sample]) -> None:
            if isinstance(run, SampleRun):
                self.tree.release(run.sequence)
                rows, steps = 1, len(samples[0].tokens)
            else:
                rows, steps = run.search.params.num_beams, run.steps
            self.report.tokens_plain_batch += rows * (len(run.state.request.tokens) + steps - 1)
            self._finish(run.state, samples)
            finished.extend(samples if self.keep else ())

        if running is not None:
            running.launch()
            self._count()  # while the device is at work
            self._compact()
            running.take(give)
            if running.done(self.scheduler.waits):
                running.commit(give)
                self._end(running)
            if running.decodes:
                self.report.seconds_in_decode += time.perf_counter() - began
        return finished

    def _schedule(self) -> RunningBatch | None:
        """First tokens of what can start now; else a step."""
        scheduled = first_tokens(self._start())
        if scheduled is None:
            rows: list[Row] = [(run.sequence, run) for run in self.samples]
            rows += [(sequence, run) for run in self.beams for sequence in run.sequences]
            unprimed = [state for state in self.scheduler.in_flight if state.first_logits is None]
            scheduled = next_step(self.tree, rows, unprimed, self.prefill_chunk)
        if scheduled is None:
            return None
        return RunningBatch(self.tree, self.runner, scheduled, self.on_token, self.on_step)

    def _start(self) -> list[Row]:
        """Fork samples and beam searches with reserved pages from prompts with known logits."""
        begun: list[Row] = []
        for state in self.scheduler.in_flight:
            count = state.granted - state.started
            if count == 0 or state.first_logits is None:
                continue
            for _ in range(count):
                if isinstance(state.request.params, SamplingParams):
                    run = SampleRun.begin(state, state.started, self.tree, self.decode, self.special_tokens)
                    self.samples.append(run)
                    begun.append((run.sequence, run))
                else:
                    search = BeamRun.begin(state, self.tree.fork(state.prompt)[0], self.decode)
                    self.beams.append(search)
                    begun.append((search.sequences[0], search))
                state.started += 1
        return begun

    def _finish(self, state: RequestState, samples: list[Sample]) -> None:
        """Count samples that have ended, retire their request after the last, and hand them out."""
        state.finished += 1
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

    def _compact(self) -> None:
        """Make the tree of beams less deep, with free pages that are not reserved.

        The step under way reads what is copied where it was: the copies wait for it on the device's stream.
        """
        if self.beams and self.beams[0].steps % COMPACT_EVERY == COMPACT_EVERY - 1:
            source, target = self.tree.compact(self.tree.allocator.free - self.scheduler.reserved)
            self.pool.copy(source, target)
            self.report.kv_bytes_copied += len(source) * self.pool.spec.bytes_per_token

    def _count(self) -> None:
        """Report the batch that ended last."""
        if self._ended is not None:
            self.report.count(self._ended, self.runner, self.pool.spec.bytes_per_token)
            self._ended = None

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _reserved_pages(self) -> int:
        """Pages that what runs now may still take."""
        samples = sum(self.tree.pages_to_extend(run.sequence, run.tokens_left) for run in self.samples)
        return samples + sum(run.pages_left for run in self.beams)

    def _tokens_left(self, sequence: Sequence) -> int:
        """Tokens that may still join a sequence of the tree; 0 if no sample grows it."""
        return next((run.tokens_left for run in self.samples if run.sequence is sequence), 0)

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
