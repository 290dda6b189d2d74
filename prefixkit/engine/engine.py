"""The loop: admit, run the uncomputed tokens, sample, grow or finish."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.planner import Planner
from prefixkit.attention.step import Step, build_step
from prefixkit.engine.beam_run import BeamRun
from prefixkit.engine.decode_run import DECODE_SETTINGS, DecodeRun, DecodeSettings
from prefixkit.engine.report import Report
from prefixkit.engine.request import Request, Sample, TokenEvent
from prefixkit.engine.sample_run import SampleRun, sample_next
from prefixkit.engine.scheduler import RequestState, Scheduler, check_fits
from prefixkit.engine.uncomputed import choose_queries
from prefixkit.ops.kv_pool import KVPool
from prefixkit.runners.decoder import CannotDecode, Decoder
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.specification import SampleRows, sample_on_host
from prefixkit.tree.radix import PrefixTree, Sequence

log = logging.getLogger("prefixkit")


class Engine:
    """Samples many sequences over one prefix tree.

    Args:
        model: Runs a step: ``Step -> logits [len(step.logit_rows), vocab]`` in float32, after appending the step's KV
            to the pool.
        pool: Where KV lives; its pages are those of ``tree``.
        tree: An empty tree over the pool's pages.
        planner: Plans attention for the model's heads.
        decode: Token ids to text; needed for stop strings and ``Sample.text``.
        special_tokens: The text of tokens that ``decode`` leaves out, by their ids; see ``StopChecker``.
        prefill_chunk: Prompt tokens that one step computes at most, beside one token for each running sequence.
        decoder: Decodes samples whose prompts are computed, many steps at a time; None: every step is planned by
            itself.
        settings: When it takes over, and how it goes on.
        sampler: Samples tokens in steps that no decoder runs.
        most_running: Samples, or beam searches, that run at once at most; the rest wait.
        keep: Whether ``run`` returns the samples; False holds none of them once ``on_sample`` has been called.
        on_sample: Called with each sample as it finishes.
        on_token: Called with each token as it is sampled (sampling only).
        on_step: Called after each step with how many tokens it sampled (sampling only).
    """

    def __init__(
        self,
        model: Callable[[Step], Tensor],
        pool: KVPool,
        tree: PrefixTree,
        planner: Planner,
        *,
        decode: Callable[[list[int]], str] | None = None,
        special_tokens: Mapping[int, str] | None = None,
        prefill_chunk: int = 1024,
        decoder: Decoder | None = None,
        settings: DecodeSettings = DECODE_SETTINGS,
        sampler: SampleRows = sample_on_host,
        most_running: int = sys.maxsize,
        keep: bool = True,
        on_sample: Callable[[Sample], None] | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1 token, got {prefill_chunk}")
        if most_running < 1:
            raise ValueError(f"most_running must be at least 1 sample, got {most_running}")
        self.model = model
        self.pool = pool
        self.tree = tree
        self.planner = planner
        self.decode = decode
        self.special_tokens = special_tokens or {}
        self.prefill_chunk = prefill_chunk
        self.decoder, self.settings, self.sampler = decoder, settings, sampler
        self.keep = keep
        self.on_sample = on_sample
        self.on_token = on_token
        self.on_step = on_step
        self.samples: list[SampleRun] = []
        self.beams: list[BeamRun] = []
        self._decoding: DecodeRun | None = None
        self._ended: list[
            RequestState
        ] = []  # all of whose samples have finished, but which are still with the scheduler
        # Weakly, for else the two would hold each other, and with them the pool, until Python looks for such cycles.
        reserved, tokens_left = weakref.WeakMethod(self._reserved_pages), weakref.WeakMethod(self._tokens_left)
        self.scheduler = Scheduler(
            tree,
            lambda: reserved()(),  # type: ignore[misc]
            most_running,
            lambda one: tokens_left()(one),  # type: ignore[misc]
        )
        self.report, self._earlier_plans = Report(), 0

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
        self.scheduler.submit(requests)
        self.report.prompts += len(requests)
        self._earlier_plans = self.planner.plans_made - self.report.plans  # of reports before this one
        try:
            while not self.scheduler.idle:
                began = time.perf_counter()
                try:
                    finished = self.step()
                finally:
                    self.report.seconds += time.perf_counter() - began
                yield from finished
        finally:
            self._release_all()

    def step(self) -> list[Sample]:
        """One forward pass and one token for everything that runs; returns the samples that this finished."""
        finished: list[Sample] = []
        if self._decoding is None:
            self.scheduler.admit()
            finished += self._start_at_once() if self.decoder is not None else []
            if self._can_decode():
                self._begin_decoding()
        if self._decoding is not None:
            return finished + self._decode(self._decoding)
        self._forward()
        self.samples += self._start()
        ended = self._advance()
        self._hand_over(ended)
        return finished + ended

    def _hand_over(self, finished: list[Sample]) -> None:
        ended, self._ended = self._ended, []
        for state in sorted(ended, key=lambda state: state.prompt.id):  # in order of admission
            self.scheduler.retire(state)
        for sample in finished:
            if self.on_sample is not None:
                self.on_sample(sample)

    # -- many steps ----------------------------------------------------------------------------------------------------

    def _start_at_once(self) -> list[Sample]:
        """Sample the first tokens of samples whose prompts are computed: no step need be run for them alone."""
        finished: list[Sample] = []
        begun, running = self._start(beams=False), self.samples
        self.samples = running + begun  # so that nothing is lost if sampling fails
        going_on, grow = self._sample(begun, finished)
        self.samples = running + going_on
        self._grow(grow)
        self._hand_over(finished)
        return finished

    def _can_decode(self) -> bool:
        """Whether all that is left to do now is to decode samples, and enough of that."""
        if self.decoder is None or self.beams or not self.samples:
            return False
        if any(state.first_logits is None or state.granted > state.started for state in self.scheduler.in_flight):
            return False
        if max(run.params.max_new_tokens - len(run.tokens) for run in self.samples) < self.settings.fewest_steps:
            return False
        leaves = {run.sequence.node for run in self.samples}
        return all(node in leaves and have == want - 1 for node, have, want in self.tree.uncomputed())

    def _begin_decoding(self) -> None:
        assert self.decoder is not None, "asked before"
        self._count_held(self._held_pages())
        try:
            with self._decode_seconds():
                self._decoding = DecodeRun(
                    self.tree, self.decoder, self.samples, self.settings, self.on_token, self.on_step
                )
        except CannotDecode as error:
            log.warning("decoding step by step: %s", error)
            self.decoder = None

    def _decode(self, decoding: DecodeRun) -> list[Sample]:
        """A step of the decoder; its samples join the tree once all have ended or enough others wait for pages."""
        finished: list[Sample] = []

        def give(run: SampleRun, sample: Sample) -> None:
            self.tree.release(run.sequence)
            self._finish(run.state, [sample], finished)
            self._hand_over([sample])
            if not self.keep:
                finished.clear()

        with self._decode_seconds():
            decoding.step(give)
            waiting = self.scheduler.waits and decoding.ended * self.settings.waited_for >= len(decoding.runs)
            if waiting or decoding.ended == len(decoding.runs):
                decoding.finish(give)
                self._end_decoding(decoding)
        return finished

    def _end_decoding(self, decoding: DecodeRun) -> None:
        self._decoding = None
        self.samples = [run for run in self.samples if run.sequence.tree is not None]
        self.report.count_decode(decoding, self.pool.spec.bytes_per_token)
        self.report.plans = self.planner.plans_made - self._earlier_plans
        self._count_held(decoding.pages_held)

    @contextmanager
    def _decode_seconds(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.report.seconds_in_decode += time.perf_counter() - began

    # -- one step, part by part ----------------------------------------------------------------------------------------

    def _forward(self) -> None:
        """Compute uncomputed tokens, and give each prompt, sample and beam search its logits."""
        unprimed = [state for state in self.scheduler.in_flight if state.first_logits is None]
        growing = [run.sequence for run in self.samples] + [beam for run in self.beams for beam in run.sequences]
        snapshot = self.tree.snapshot()
        asking = [state.prompt.node.index for state in unprimed]
        decoding = [sequence.node.index for sequence in growing]
        tree = choose_queries(snapshot, decoding, asking, self.prefill_chunk)
        if tree is None:
            return
        nodes = self.tree.nodes()
        queries = tree.queries
        runs = list(zip(queries.node.tolist(), queries.begin.tolist(), queries.end.tolist(), strict=True))
        tokens = np.concatenate([nodes[node].tokens[begin:end] for node, begin, end in runs])
        row_of = tree.last_rows()
        wanted = np.unique(row_of[np.array(asking + decoding, dtype=np.int64)])
        wanted = wanted[wanted >= 0]
        step = build_step(tree, tokens, wanted, self.planner, self.pool.spec.device)
        logits = self.model(step)
        self.tree.mark_computed([nodes[node] for node, _, _ in runs], queries.end.tolist())
        self._count(step, growing)
        self._hand_out(logits, wanted, row_of, unprimed, asking, decoding)

    def _hand_out(
        self,
        logits: Tensor,
        wanted: NDArray[np.int64],
        row_of: NDArray[np.int64],
        unprimed: list[RequestState],
        asking: list[int],
        decoding: list[int],
    ) -> None:
        asked = row_of[np.array(asking, dtype=np.int64)]
        computed = np.flatnonzero(asked >= 0)
        for i, row in zip(computed.tolist(), np.searchsorted(wanted, asked[computed]).tolist(), strict=True):
            # A copy: a view would keep the whole step's logits alive.
            unprimed[i].first_logits = logits[row].clone()
        rows = iter(np.searchsorted(wanted, row_of[np.array(decoding, dtype=np.int64)]).tolist())
        for run in self.samples:
            run.logits = logits[next(rows)]
        for beam_run in self.beams:
            beam_run.logits = logits[[next(rows) for _ in beam_run.sequences]]

    def _start(self, beams: bool = True) -> list[SampleRun]:
        """Fork samples and beam searches with reserved pages from prompts with known logits; returns the samples."""
        begun: list[SampleRun] = []
        for state in self.scheduler.in_flight:
            count = state.granted - state.started
            if count == 0 or state.first_logits is None:
                continue
            sampling = isinstance(state.request.params, SamplingParams)
            if not (sampling or beams):
                continue
            for sequence in self.tree.fork(state.prompt, count):
                if sampling:
                    begun.append(SampleRun.begin(state, state.started, sequence, self.decode, self.special_tokens))
                else:
                    self.beams.append(BeamRun.begin(state, sequence, self.decode))
                state.started += 1
        return begun

    def _advance(self) -> list[Sample]:
        """Sample a token for every run, grow the sequences that go on, and take out those that are done."""
        finished: list[Sample] = []
        self.samples, grow = self._sample(self.samples, finished)
        for beam_run in list(self.beams):
            growth, hypotheses = beam_run.advance(self.tree)
            grow += growth
            if hypotheses is not None:
                self.beams.remove(beam_run)
                self._finish(beam_run.state, hypotheses, finished)
        self._grow(grow)
        return finished

    def _sample(
        self, runs: list[SampleRun], finished: list[Sample]
    ) -> tuple[list[SampleRun], list[tuple[Sequence, int]]]:
        """Sample a token for each run; returns those that go on, and by what.  Others are released and ``finished``."""
        going_on: list[SampleRun] = []
        grow: list[tuple[Sequence, int]] = []
        for run, token, logprob in sample_next(runs, self.sampler):
            sample = run.accept(token, logprob, self.on_token)
            if sample is None:
                going_on.append(run)
                grow.append((run.sequence, token))
            else:
                self.tree.release(run.sequence)
                self._finish(run.state, [sample], finished)
        if runs and self.on_step is not None:
            self.on_step(len(runs))
        return going_on, grow

    def _grow(self, grow: list[tuple[Sequence, int]]) -> None:
        if grow:
            self.tree.extend_each([sequence for sequence, _ in grow], [token for _, token in grow])

    def _finish(self, state: RequestState, samples: list[Sample], finished: list[Sample]) -> None:
        state.finished += 1
        if state.finished == state.wanted:
            self._ended.append(state)
        finished += samples
        self.report.samples += len(samples)
        for sample in samples:
            self.report.new_tokens += len(sample.tokens)
            self.report.tokens_plain_batch += len(state.request.tokens) + len(sample.tokens) - 1

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _reserved_pages(self) -> int:
        """Pages that what runs now may still take."""
        samples = sum(self.tree.pages_to_extend(run.sequence, run.tokens_left) for run in self.samples)
        return samples + sum(run.pages_left for run in self.beams)

    def _tokens_left(self, sequence: Sequence) -> int:
        """Tokens that may still join a sequence of the tree; 0 if no sample grows it."""
        return next((run.tokens_left for run in self.samples if run.sequence is sequence), 0)

    def _count(self, step: Step, growing: list[Sequence]) -> None:
        report, spec = self.report, self.pool.spec
        report.steps += 1
        report.plans = self.planner.plans_made - self._earlier_plans
        report.tokens_computed += step.num_rows
        report.kv_bytes_read += step.kv_tokens_read * spec.bytes_per_token
        report.kv_bytes_read_unshared += step.kv_tokens_unshared * spec.bytes_per_token
        self._count_held(self._held_pages())
        alone = sum(sequence.length for sequence in growing) * spec.bytes_per_token
        report.kv_bytes_unshared_peak = max(report.kv_bytes_unshared_peak, alone)

    def _held_pages(self) -> int:
        return self.tree.allocator.num_pages - self.tree.allocator.free - self.tree.reserved

    def _count_held(self, pages: int) -> None:
        held = pages * self.tree.page_size * self.pool.spec.bytes_per_token
        self.report.kv_bytes_held_peak = max(self.report.kv_bytes_held_peak, held)

    def _release_all(self) -> None:
        """Give every page back; after a run to the end there is nothing left to give but the tree's own."""
        if self._decoding is not None:
            self._end_decoding(self._decoding)
        left = [run.sequence for run in self.samples] + [one for run in self.beams for one in run.sequences]
        for sequence in left:
            if sequence.tree is not None:  # a step that failed may have released it
                self.tree.release(sequence)
        self.samples, self.beams, self._ended = [], [], []
        self.scheduler.close()
