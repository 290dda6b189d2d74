"""Decode steps as CUDA graphs: one for each bucket of batch sizes, over arrays whose addresses stay.

A graph holds a whole step: the tree grows by a token per row, the model runs, the next tokens are sampled.  What
changes between steps is in tensors that the graph only reads: the tree, the plan, the sampling parameters.  So a graph
outlives every tree, and the host's part of a step is to launch it and to read, some steps later, what it sampled.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.decode_batch import DecodeBatch
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.staging import upload
from prefixkit.attention.step import Step
from prefixkit.ops.backend import GraphPlanning, NotCapturable
from prefixkit.runners.capture_errors import first_line, is_about_capture, is_out_of_memory, reason_of
from prefixkit.runners.decoder import CannotDecode, Sampled, decode_step
from prefixkit.runners.graph_arrays import GraphArrays, bucket_of
from prefixkit.sampling.specification import SamplingBatch

log = logging.getLogger("prefixkit")


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Start it again."""


# A plan stays right as leaves grow, but its pieces grow apart.
REPLAN_EVERY = 64


class GraphDecoder:
    """Decodes by replaying CUDA graphs (see ``Decoder``).

    Args:
        model: Runs a step in a way that can be captured: no waiting for the device, no allocation outside torch.
        planning: How steps in graphs are planned, for the model's heads.
        page_size: Of the pool.
        device: The GPU.
        shrink: A graph for fewer rows is captured where it has at most this part of the rows of the smallest there is
            that would do.  Lower where capturing takes long.
        weights: Says where what the model reads lies; asked once for each batch.  Graphs are captured again once that
            is elsewhere.  None: it never is.
        moves: Counts what may have moved it; asked before each step, and ``weights`` again when it has changed.
        capture: Makes a graph of the work that its first argument does when called, in the memory pool that is the
            second.

    Attributes:
        planned: The plan of the batch at hand.
        captures: Graphs that were captured, again ones included.
        seconds_capturing: What that took.
        graph_bytes: GPU memory that the graphs share for what steps compute.
    """

    def __init__(
        self,
        model: Callable[[Step], Tensor],
        planning: GraphPlanning,
        page_size: int,
        device: torch.device | str,
        shrink: float = 1.0,
        weights: Callable[[], Hashable] | None = None,
        moves: Callable[[], int] | None = None,
        capture: Callable[[Callable[[], None], object], Graph] | None = None,
    ) -> None:
        self.model, self.planning, self.page_size = model, planning, page_size
        self.device, self.shrink = torch.device(device), shrink
        self.weights, self.moves = weights, moves
        self.capture = capture_graph if capture is None else capture
        self.planned: StepPlan
        self.captures = 0
        self.seconds_capturing = 0.0
        self._graphs: dict[int, Graph] = {}
        self._unread: deque[tuple[int, int]] = deque()  # place in the ring, rows
        self._arrays: GraphArrays | None = None
        self._read_from: Hashable = None  # where the weights are that graphs read
        self._moves = 0  # when that was asked

    @property
    def stale(self) -> bool:
        if self.moves is None or self.weights is None or self.moves() == self._moves:
            return False
        return self.weights() != self._read_from  # else another model's have moved

    @property
    def graph_bytes(self) -> int:
        if not self._graphs:
            return 0
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self._pool))

    # -- Decoder -------------------------------------------------------------------------------------------------------

    def begin(self, batch: DecodeBatch, sampling: SamplingBatch, last: NDArray[np.int64]) -> None:
        self._unread.clear()
        try:
            return self._begin(batch, sampling, last)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        # Not while the error is handled: its traceback holds what was made until then.
        self._release()
        raise CannotDecode(f"no memory for CUDA graphs of {batch.num_rows} rows: {reason}")

    def _begin(self, batch: DecodeBatch, sampling: SamplingBatch, last: NDArray[np.int64]) -> None:
        with self._here():
            self._forget_moved()
            arrays = self._reserve(batch)
            bucket = self._bucket(batch.num_rows)
            self._graph(arrays, bucket)
            arrays.start(sampling, last)
            self._take(arrays, batch, bucket)

    def keep(self, batch: DecodeBatch, rows: NDArray[np.intp]) -> None:
        arrays = self._arrays
        assert arrays is not None and arrays.sampler is not None, "begun before"
        with self._here():
            self._forget_moved()
            bucket = self._bucket(batch.num_rows)
            try:
                self._graph(arrays, bucket)
            except RuntimeError as error:
                if not (isinstance(error, CannotDecode) or is_out_of_memory(error)):
                    raise
                log.warning("going on with a graph for more rows: %s", first_line(error))
                bucket = self._running
                self._forget_moved()  # what failed may have moved them first
                self._graph(arrays, bucket)
            (index,) = upload([rows.astype(np.int64)], self.device)
            arrays.sampler.keep(index)
            self._take(arrays, batch, bucket)

    def step(self) -> None:
        arrays = self._arrays
        assert arrays is not None and arrays.sampler is not None, "begun before"
        if self.stale:
            raise RuntimeError("the model's weights have moved since the last step: keep all rows before the next one")
        self._see_moves()
        with self._here():
            if self._steps and self._steps % REPLAN_EVERY == 0:
                arrays.replan()
            self._steps += 1
            self._graphs[self._running].replay()
            sampled = arrays.sampler.tokens[: self._rows], arrays.sampler.logprobs[: self._rows]
            self._unread.append((arrays.ring.send(*sampled), self._rows))

    def read(self) -> Sampled:
        arrays = self._arrays
        assert arrays is not None, "begun before"
        place, rows = self._unread.popleft()
        arrays.ring.ready[place].synchronize()
        return arrays.ring.tokens[place, :rows].numpy().copy(), arrays.ring.logprobs[place, :rows].numpy().copy()

    def _here(self) -> AbstractContextManager[object]:
        """The GPU as the current device: captures and events go by that."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # -- arrays and graphs ---------------------------------------------------------------------------------------------

    def _take(self, arrays: GraphArrays, batch: DecodeBatch, bucket: int) -> None:
        arrays.load(batch)
        self.planned = self._plan_of(arrays, batch)
        self._running, self._rows, self._steps = bucket, batch.num_rows, 0

    def _reserve(self, batch: DecodeBatch) -> GraphArrays:
        """The arrays, if they hold the batch; else larger ones, for which graphs must be captured anew."""
        if self._arrays is None or not self._arrays.holds(batch):
            if self._graphs:
                log.info("a batch of %d rows needs larger arrays: CUDA graphs are captured again", batch.num_rows)
            self._graphs.clear()
            self._arrays = None  # before the new ones are made
            self._pool = torch.cuda.graph_pool_handle()
            self._arrays = GraphArrays(batch, self.planning, self.page_size, self.device)
        return self._arrays

    def _forget_moved(self) -> None:
        """Drop graphs that read weights where they no longer are: that memory may have been reused by now."""
        there = None if self.weights is None else self.weights()
        if self._graphs and there != self._read_from:
            log.info("the model's weights have moved: CUDA graphs are captured again")
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()
        self._read_from = there
        self._see_moves()

    def _see_moves(self) -> None:
        """Note that the moves of weights so far have left those that graphs read where they were."""
        self._moves = self.moves() if self.moves is not None else 0

    def _release(self) -> None:
        """Give back all memory of graphs and of what they read and write."""
        self._graphs.clear()
        self._arrays = None
        self._unread.clear()

    def _bucket(self, rows: int) -> int:
        """Which bucket's graph is to run so many rows."""
        there, best = [size for size in self._graphs if size >= rows], bucket_of(rows)
        return min(there) if there and best > self.shrink * min(there) else best

    def _graph(self, arrays: GraphArrays, rows: int) -> Graph:
        """The graph of a bucket, captured if it is its first time.  Then the arrays hold no batch afterwards."""
        if rows not in self._graphs:
            began = time.perf_counter()
            arrays.clear()
            step = self._step_of(arrays, rows)
            with torch.inference_mode():
                # Twice without a graph: everything lazy has happened then.  No row is there, so nothing is written.
                try:
                    arrays.make_sampler(self.model(step).shape[1])
                except NotCapturable as error:
                    raise CannotDecode(str(error)) from error
                with _no_waiting():
                    self.model(step)
                self._forget_moved()  # compiled layers move theirs in their first step
                self._graphs[rows] = self._capture(arrays, step)
            self.captures += 1
            took = time.perf_counter() - began
            self.seconds_capturing += took
            log.info(
                "captured a decode step of %d rows in %.2f s; graphs hold %.0f MiB",
                rows,
                took,
                self.graph_bytes / 2**20,
            )
        return self._graphs[rows]

    def _capture(self, arrays: GraphArrays, step: Step) -> Graph:
        sampler = arrays.sampler
        assert sampler is not None, "made before"

        def run() -> None:
            arrays.tree.advance(step.num_rows)
            sampler.sample(self.model(step))

        try:
            return self.capture(run, self._pool)
        except RuntimeError as error:
            reason = reason_of(error)
            if is_about_capture(reason):
                raise CannotDecode(f"a step cannot be captured in a CUDA graph: {first_line(reason)}") from error
            raise reason from None  # out of memory, or broken

    def _step_of(self, arrays: GraphArrays, rows: int) -> Step:
        return decode_step(arrays.first, arrays.tree, arrays.wanted[:rows], self._plan_of(arrays, arrays.first))

    def _plan_of(self, arrays: GraphArrays, batch: DecodeBatch) -> StepPlan:
        return self.planning.step_plan(arrays.planner.work, arrays.tree.nodes, batch.tree)


def capture_graph(work: Callable[[], None], pool: object) -> Graph:
    """A CUDA graph of what ``work`` does on the current stream, in a memory pool that graphs share."""
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(torch.cuda.current_stream()),  # a capture that fails leaves its own stream the current one
        torch.cuda.graph(graph, pool=pool),  # type: ignore[arg-type]
    ):
        work()
    return graph


@contextmanager
def _no_waiting() -> Iterator[None]:
    """CannotDecode if the host waits for the device: a capture would fail, and not as cleanly.

    Mixtures of experts do that whose layers ask which experts have tokens, and rotary embeddings that ask for the
    longest position.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise CannotDecode(
            f"the model waits for the GPU in each step, which no CUDA graph can hold: {first_line(error)}"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
