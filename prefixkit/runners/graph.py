"""Decode steps as CUDA graphs: one for each bucket of batch sizes, over static buffers.

A graph holds a whole step: it grows the tree by a token per row, runs the model and samples the next tokens.  The tree,
the plan and the sampling parameters, which change between steps, are tensors that the graph only reads.  So a graph
outlives every tree; the host only launches it, and reads its sampled tokens some steps later.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.gpu.capacity import PlanTooLarge
from prefixkit.attention.gpu.staging import upload
from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import Step, mean_reads
from prefixkit.ops.backend import GraphPlanning
from prefixkit.runners.batch import Batch, Pace, Results, Sampling
from prefixkit.runners.capture import (
    Capture,
    Captured,
    CudaCapture,
    GraphOutput,
    Graphs,
    capture_step,
    done_by_all,
    first_step,
    on_gpu,
    output_for,
)
from prefixkit.runners.capture_errors import first_line, is_out_of_memory
from prefixkit.runners.decode_tree import BatchTooLarge
from prefixkit.runners.eager import EagerRunner
from prefixkit.runners.graph_arrays import CannotCapture, GraphArrays, bucket_of
from prefixkit.runners.graph_weights import GraphWeights
from prefixkit.runners.masked_steps import MaskedSteps, masked_steps
from prefixkit.runners.short_steps import ShortSteps
from prefixkit.tree.state_slots import StateMoves

log = logging.getLogger("prefixkit")

# A plan stays correct as leaves grow, but its KV splits become uneven.
REPLAN_EVERY = 64
# The host never waits for the previous step; compacting rows, and appending tokens to the tree, take it about a step.
PACE = Pace(ahead=2, slack=16, waited_for=8)
# Batches of fewer steps are not worth a capture.
FEWEST_STEPS = 4


class GraphRunner:
    """Replays CUDA graphs for decode steps, and leaves other steps to an eager runner (see ``Runner``).

    Args:
        eager: Runs steps with prompts in them, and all steps once the model's steps cannot be captured.
        model: Runs a step in a way that can be captured: no waiting for the device, no allocation outside torch.
        plannings: The planning of captured steps, for the heads of each kind of layers.
        page_size: Page size of the pool.
        pace: How far the host runs ahead.
        fewest_steps: A batch that runs for fewer steps captures no graph.
        least_rows: Fewest rows of a graph.
        weights: Returns the addresses of the tensors that the model reads, and its modules' modes, such as adapters,
            from the state of :meth:`start_call` if there is one.  Graphs are captured again once the result differs.
        moves: Counts events that may have moved these tensors; called before each step: a new count calls ``weights``.
        keep_states: Whether layers of the model keep a state.
        short: Most query rows of other steps that graphs run too (see :class:`ShortSteps`); 0: they run none.
        capture: Makes the object that captures graphs.

    Attributes:
        graphs: What captures the graphs, and counts captures and steps.
        replan_every: A batch is planned again after this many steps; may be set.
    """

    def __init__(
        self,
        eager: EagerRunner,
        model: Callable[[Step], Tensor],
        plannings: Sequence[GraphPlanning],
        page_size: int,
        *,
        pace: Pace = PACE,
        fewest_steps: int = FEWEST_STEPS,
        least_rows: int = 1,
        weights: Callable[..., Hashable] = lambda *_: None,
        moves: Callable[[], int] = lambda: 0,
        keep_states: bool = False,
        short: int = 0,
        capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        self.eager, self.model, self.plannings, self.page_size = eager, model, tuple(plannings), page_size
        self.device, self.least_rows, self.fewest_steps = eager.device, least_rows, fewest_steps
        self.graphs, self._weights = Graphs(capture), GraphWeights(weights, moves)
        self._pace, self._eagerly, self._keep_states, self.replan_every = pace, False, keep_states, REPLAN_EVERY
        self._states: StateMoves | None = None  # those of the batch's first step
        self._bucket, self._rows, self._steps, self._refused, self._no_memory = 0, 0, 0, False, False
        self._masked: MaskedSteps | None = None  # only for a batch with grammars
        self._graphs: dict[tuple[int, GraphOutput, Hashable], Captured] = {}  # by bucket, output and variant
        self._variant: Hashable = None
        self._unread: deque[Results | tuple[int, int]] = deque()  # results, or index in the ring and number of rows
        self._arrays: GraphArrays | None = None
        of = model, eager.model, eager.compiled, plannings, eager.layer_counts, short, self.graphs, self._weights
        eager.graphs = self._short = ShortSteps(*of, eager.agreement, self.device) if short else None

    @property
    def pace(self) -> Pace:
        return self.eager.pace if self._eagerly else self._pace

    def counters(self) -> dict[str, float]:
        return {**self.eager.counters(), **self.graphs.counters()}

    @property
    def graph_bytes(self) -> int:
        return self.graphs.bytes

    @property
    def reads(self) -> tuple[int, int]:
        if self._eagerly:
            return self.eager.reads
        tree = self._tree_after(self._steps - 1)
        return mean_reads(self._plans(), self.eager.layer_counts, tree)

    @property
    def sees_part(self) -> bool:
        return self.eager.sees_part

    # -- Runner --------------------------------------------------------------------------------------------------------

    def drop_graphs(self, *, moved: bool = False) -> None:  # moved: the weights have
        self._graphs.clear()
        if self._short is not None:
            self._short.drop(moved)
        self.graphs.drop()

    def start_call(self, state: object = None) -> None:
        self._no_memory = False  # memory may have been freed since
        with on_gpu(self.device):
            self._drop_stale_graphs(state)

    def launch(self, batch: Batch) -> None:
        self._unread.clear()
        self._eagerly = not self._prepare_graph(batch)
        if not self._eagerly:
            return self._replay()
        # If graphs will run the later steps, compile layers now, before the capture.
        captures = batch.steps > self.fewest_steps and not (self._refused or self._no_memory)
        self._refresh()
        self.eager.launch(batch, compiling=captures)

    def repeat(self, tokens: Tensor | None = None) -> None:
        if self._eagerly:
            self._refresh()
            return self.eager.repeat(tokens)
        if self._weights.stale(self.eager.agreement):  # a callback has moved them
            self.select_rows(np.arange(self._rows))
        self._weights.skip_moves()
        if tokens is not None and self._arrays is not None:
            self._arrays.tree.sampled[: self._rows] = tokens
        self._replay()

    @property
    def logits(self) -> Tensor:
        if self._eagerly:
            return self.eager.logits
        logits = self._graphs[self._bucket, self._output, self._variant].logits
        assert logits is not None, "nothing is sampled"
        return logits[: self._rows]

    def select_rows(self, rows: NDArray[np.intp]) -> None:
        if self._eagerly:
            return self.eager.select_rows(rows)
        arrays = self._arrays
        assert arrays is not None, "launched before"
        with on_gpu(self.device):
            if self._graphs[self._bucket, self._output, self._variant].divided:  # rows may move to another's part
                self.eager.agreement.exchange(*arrays.sampler.state(self._bucket))
            self._drop_stale_graphs()
            if self._masked is not None:
                self._masked.select_rows(rows)
            bucket = self._bucket_for(len(rows))
            tree, variant = self._tree_after(self._steps).select_rows(rows), self._variant
            self._variant = self._variant_of(tree)
            try:
                self._ensure_graph(arrays, bucket, tree)
            except RuntimeError as error:
                if not (isinstance(error, CannotCapture) or is_out_of_memory(error)):
                    raise
                log.warning("going on with a graph for more rows: %s", first_line(error))
                bucket, self._variant = self._bucket, variant
                self._drop_stale_graphs()  # the failed capture may have moved weights
                self._ensure_graph(arrays, bucket, tree)
            arrays.sampler.select_rows(upload([rows.astype(np.int64)], self.device)[0])
            arrays.upload_tree(tree)
            if self._states is not None:
                before = self._states.repeated() if self._steps else self._states
                self._states = before.select_rows(rows.tolist())
                arrays.upload_states(self._states)
            self._start_batch(arrays, tree, bucket)

    def read(self) -> Results:
        if self._eagerly:
            return self.eager.read()
        arrays, oldest = self._arrays, self._unread.popleft()
        assert arrays is not None, "launched before"
        if isinstance(oldest, Results):
            return oldest
        return arrays.ring.read(*oldest, arrays.most_top(self._output.top), self._top, self._output.drawn)

    def sample(self, logits: Tensor, sampling: Sampling) -> Results:
        return self.eager.sample(logits, sampling)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _prepare_graph(self, batch: Batch) -> bool:
        """Whether a graph is ready to run the batch's steps."""
        if self._refused or self._no_memory or not batch.decodes:
            return False
        sampling, rows = batch.outputs.sampling, len(batch.outputs.rows)
        output, self._variant = output_for(sampling), self._variant_of(batch.tree)
        if batch.steps < self.fewest_steps and (self._bucket_for(rows), output, self._variant) not in self._graphs:
            return False
        self._output, self._top, self._sampling = output, 0 if sampling is None else sampling.top, sampling
        self._masked = masked_steps(output, sampling, self.eager.agreement)
        try:
            with on_gpu(self.device):
                self._refresh()
                self._place_batch(batch, self._bucket_for(rows))
                return True
        except CannotCapture as error:
            reason, self._refused = str(error), True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._no_memory = True
            reason = f"no memory for CUDA graphs of {rows} rows: {first_line(error)}"
        # Not inside the except blocks, where the error's traceback still holds the buffers made so far.
        self.drop_graphs()
        self._arrays = None
        self._unread.clear()
        log.warning("decoding step by step: %s", reason)
        return False

    def _place_batch(self, batch: Batch, bucket: int) -> None:
        """Capture a graph if there is none, and stage or upload the batch (see ``GraphOutput.uploads_batch``)."""
        arrays, tree, staged = self._arrays, batch.tree, False
        known = (bucket, self._output, self._variant) in self._graphs
        if arrays is not None and self._output.uploads_batch and known:
            with suppress(BatchTooLarge, PlanTooLarge):
                arrays.stage(tree, batch.tokens)
                staged = True
        if arrays is None or not staged:
            arrays = self._arrays_for(tree)
            self._ensure_graph(arrays, bucket, tree)
            if self._output.uploads_batch:
                arrays.stage(tree, batch.tokens)
        if (sampling := batch.outputs.sampling) is not None:
            arrays.upload_sampling(sampling.batch)
        if not self._output.uploads_batch:
            arrays.upload_tokens(batch.tokens)
            arrays.upload_tree(tree)
        self._states = batch.states
        arrays.upload_states(batch.states)
        self._start_batch(arrays, tree, bucket)

    def _replay(self) -> None:
        arrays, captured = self._arrays, self._graphs[self._bucket, self._output, self._variant]
        assert arrays is not None, "launched before"
        with on_gpu(self.device):
            if self._steps and self._steps % self.replan_every == 0:
                tree = self._tree_after(self._steps)
                arrays.replan(tree)
                self._plans = cache(partial(arrays.plans, tree))
            self._steps, self.graphs.replays = self._steps + 1, self.graphs.replays + 1
            captured.graph.replay()
            if self._steps == 1:
                arrays.continue_states()
            if self._sampling is None:
                assert captured.logits is not None, "nothing is sampled"
                return self.eager.agreement.broadcast(captured.logits[: self._rows])
            if captured.logits is not None and self._masked is not None:
                self._unread.append(self._masked.sample(arrays, captured.logits[: self._rows], self._output.drawn))
                self.eager.grammar_waits += 1
                return
            if captured.logits is not None:
                logits = captured.logits[: self._rows].float()
                self._unread.append(self.eager.sample(logits, self._sampling))
                return
            if not self._output.top:
                arrays.ring.copy(*arrays.sampler.sampled(self._rows, self._output.drawn))
            self._unread.append((arrays.ring.record(first=self._output.top > 0), self._rows))

    def _tree_after(self, steps: int) -> StepTree:
        return self._tree.grown(steps) if steps > 0 else self._tree

    # -- arrays and graphs ---------------------------------------------------------------------------------------------

    def _start_batch(self, arrays: GraphArrays, tree: StepTree, bucket: int) -> None:
        self._tree, self._plans = tree, cache(partial(arrays.plans, tree))  # made while the device runs the step
        self._bucket, self._rows, self._steps = bucket, len(tree.queries.node), 0

    def _arrays_for(self, tree: StepTree) -> GraphArrays:
        """The buffers if they hold the tree; else larger ones, for which graphs must be captured again."""
        if self._arrays is None or not self._arrays.holds(tree):
            if self._graphs:
                log.info("%d rows need larger arrays: CUDA graphs are captured again", len(tree.queries.node))
            self.drop_graphs()
            self._arrays = None  # before the new ones are made
            rows = self._bucket_for(len(tree.queries.node))
            made = tree, rows, self.plannings, self.page_size, self.device, self._keep_states
            self._arrays = done_by_all(self.eager.agreement, lambda: GraphArrays(*made))
        return self._arrays

    def _refresh(self) -> None:
        """Drop stale graphs if events since the last look may have moved weights."""
        if self._weights.stale(self.eager.agreement):
            self._drop_stale_graphs()

    def _drop_stale_graphs(self, state: object = None) -> None:
        """Drop graphs that read weights at old addresses: that memory may have been reused."""
        if self._weights.look(self.eager.agreement, state):
            if self.graphs:
                log.info("the model's weights have moved, or its modes have changed: CUDA graphs are captured again")
            self.drop_graphs(moved=True)

    def _variant_of(self, tree: StepTree) -> Hashable:
        """The part of a graph's key that depends on the tree: graphs of other variants cannot run its steps."""
        return tuple(planning.variant(tree) for planning in self.plannings)

    def _bucket_for(self, rows: int) -> int:
        """The bucket whose graph runs a batch of ``rows`` rows."""
        return bucket_of(max(rows, self.least_rows))

    def _ensure_graph(self, arrays: GraphArrays, rows: int, tree: StepTree) -> None:
        """Capture a bucket's graph for trees like this one if there is none.  After a capture, no batch is uploaded."""
        key = rows, self._output, self._variant
        if key in self._graphs:
            return
        began = time.perf_counter()
        agreement, counts = self.eager.agreement, self.eager.layer_counts
        step = done_by_all(agreement, lambda: first_step(self.model, self.eager.model, arrays, rows, tree, counts))
        self._drop_stale_graphs()  # compiled layers move their weights in their first step
        work = self.graphs, self.model, arrays, self._output, step, agreement
        self._graphs[key] = done_by_all(agreement, lambda: capture_step(*work))
        self.graphs.count(f"a decode step of {rows} rows", began)
