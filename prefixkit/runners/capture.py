"""Capture of steps on a GPU: one launch of a decode step then grows the tree, runs the model and samples."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from prefixkit.agreement import Agreement
from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import Step
from prefixkit.ops.backend import NotCapturable
from prefixkit.runners.batch import Sampling
from prefixkit.runners.capture_errors import first_line, is_about_capture, is_out_of_memory, reason_of
from prefixkit.runners.graph_arrays import CannotCapture, GraphArrays
from prefixkit.runners.sampler import top_tokens
from prefixkit.runners.waiting import RefuseWaiting

log = logging.getLogger("prefixkit")

# The start of a capture waits for the whole device, which is an error while another thread captures.
_capturing = threading.Lock()
# Streams of dropped captures, by device, those dropped earliest first.
_released: dict[int, deque[Any]] = {}
# The outcomes of a capture.
_CANNOT, _NO_MEMORY, _DONE = range(3)
T = TypeVar("T")
# Graphs return at least this many of the likeliest tokens, if any.
_FEWEST_TOP = 16


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch the captured work."""


class Capture(Protocol):
    """Captures work; all its graphs share one memory pool."""

    def __call__(self, work: Callable[[], None]) -> Graph:
        """A graph of the work that ``work`` enqueues on the current stream."""

    @property
    def bytes(self) -> int:
        """Bytes of GPU memory of the memory pool."""


class Graphs:
    """What captures a runner's graphs, which share one memory pool, and what they have done so far.

    Args:
        make: Makes the object that captures; called again for the first graph after :meth:`drop`.

    Attributes:
        captures: Number of captures, including repeated ones.
        seconds_capturing: Seconds spent capturing.
        replays: Steps that graphs ran.
    """

    def __init__(self, make: Callable[[], Capture]) -> None:
        self.captures, self.seconds_capturing, self.replays = 0, 0.0, 0
        self._make = make
        self._capture: Capture | None = None

    def __bool__(self) -> bool:
        """Whether there may be graphs."""
        return self._capture is not None

    def __call__(self, work: Callable[[], None]) -> Graph:
        """A graph of the work that ``work`` enqueues on the current stream."""
        self._capture = self._capture or self._make()
        return self._capture(work)

    def counters(self) -> dict[str, float]:
        """The counters, keyed by field of the report."""
        return {
            "captures": self.captures,
            "seconds_capturing": self.seconds_capturing,
            "graph_steps": self.replays,
        }

    def count(self, what: str, began: float) -> None:
        """Count and log a capture of ``what`` that began at this time of ``time.perf_counter``."""
        took = time.perf_counter() - began
        self.captures, self.seconds_capturing = self.captures + 1, self.seconds_capturing + took
        log.info("captured %s in %.2f s; graphs hold %.0f MiB", what, took, self.bytes / 2**20)

    def drop(self) -> None:
        """Drop the memory pool, with the last of its graphs."""
        self._capture = None

    @property
    def bytes(self) -> int:
        """Bytes of GPU memory of the memory pool."""
        return 0 if self._capture is None else self._capture.bytes


class GraphOutput(NamedTuple):
    """The outputs of a captured step.

    Attributes:
        samples: Whether the graph samples tokens; else it returns logits.
        top: How many of the likeliest tokens of each row it returns in addition to the sampled one; 0 for none.
        uploads_batch: Whether each replay copies the batch from the staging buffers: batches of beams, and those whose
            logits the host processes, change at every step.
        drawn: Whether the graph returns the probabilities with which tokens were sampled.
    """

    samples: bool
    top: int = 0
    uploads_batch: bool = False
    drawn: bool = False


@dataclass(eq=False)
class Captured:
    """A captured step.

    Attributes:
        step: What the graph runs.
        graph: The graph.
        logits: The logits that a replay writes, if the graph does not sample from them.
        divided: Whether each process samples its part of the rows alone.

    The graph holds the addresses of the step's tensors, not the tensors.  Those that planners make for each plan have
    no other owner than ``step``: once they are freed, their memory may be that of other tensors, which replays read.
    """

    step: Step
    graph: Graph = field(init=False)
    logits: Tensor | None = None
    divided: bool = False


class CudaCapture:
    """Captures CUDA graphs in a memory pool that they share.

    One thread captures at a time, and the capture is thread-local: other threads may allocate, launch and wait.  The
    object captures on a stream of its own: when pinned memory that a capture has read is freed, torch records events on
    the capture's stream, and these must not fall into another capture.  When the object is gone, a later one reuses its
    stream, because cuBLAS holds some 32 MiB for every stream that it has ever seen.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        released = _released.setdefault(torch.cuda.current_device(), deque())
        try:
            self._stream = released.popleft()
        except IndexError:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        weakref.finalize(self, released.append, self._stream).atexit = False

    def __call__(self, work: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.stream(torch.cuda.current_stream())  # a failed capture leaves its own stream current
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with _capturing, current, capture:
            work()
        return graph

    @property
    def bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self._pool))


def first_step(
    model: Callable[[Step], Tensor],
    eager: Callable[[Step], Tensor],
    arrays: GraphArrays,
    rows: int,
    tree: StepTree,
    layer_counts: tuple[int, ...],
) -> Step:
    """Run a step over buffers that hold no row, so that it writes nothing, to do all lazy initialisation.

    Args:
        model, eager: Runs steps; the same without compiled layers, which dynamo would skip under a dispatch mode.
        arrays, rows, tree: The buffers, and the step to be captured over them.
        layer_counts: Number of layers of each kind.

    Raises:
        CannotCapture: no graph can hold the step.
    """
    arrays.clear()
    step = arrays.tree.step(tree, arrays.wanted[:rows], arrays.plans(tree), layer_counts)
    step = replace(step, states=arrays.states(rows))
    with torch.inference_mode():
        try:
            arrays.make_sampler(model(step).shape[1])
        except NotCapturable as error:
            raise CannotCapture(str(error)) from error
        with RefuseWaiting():  # type: ignore[no-untyped-call]
            eager(step)
        model(step)
    return step


def capture_step(
    capture: Capture,
    model: Callable[[Step], Tensor],
    arrays: GraphArrays,
    output: GraphOutput,
    step: Step,
    agreement: Agreement,
) -> Captured:
    """Capture a step over the static buffers; all processes get the outputs of the first one of the ``agreement``.

    Raises:
        CannotCapture: the step does work that no graph can hold.
        RuntimeError: there is no memory for the graph, or the device has failed.
    """
    arrays.ring.allocate_top(arrays.most_top(output.top))
    captured = Captured(step)

    def run() -> None:
        if output.uploads_batch:
            arrays.enqueue_copy(step.num_rows)
        arrays.advance(step.num_rows)
        logits = model(replace(step, own_logits=output.samples and not output.top))
        if not output.samples:
            captured.logits = logits
            return
        captured.divided = len(logits) < step.num_rows
        first = agreement.rank * len(logits) if captured.divided else 0
        _, logprobs = arrays.sampler.sample(logits, output.drawn, first=first)
        sampled = arrays.sampler.sampled(step.num_rows, output.drawn)
        given = [one for one in sampled if one is not None]
        if captured.divided:
            return agreement.exchange(*given)
        if not output.top:
            return agreement.broadcast(*given)
        top = top_tokens(logits, output.top, logprobs)
        agreement.broadcast(*given, *top)
        arrays.ring.copy(*sampled, top)

    captured.graph = graph_of(capture, run)
    return captured


def graph_of(capture: Capture, work: Callable[[], None]) -> Graph:
    """A graph of work that runs a step.

    Raises:
        CannotCapture: the step does work that no graph can hold.
        RuntimeError: there is no memory for the graph, or the device has failed.
    """
    try:
        with torch.inference_mode():
            return capture(work)
    except RuntimeError as error:
        reason = reason_of(error)
        if is_about_capture(reason):
            raise CannotCapture(f"a step cannot be captured in a CUDA graph: {first_line(reason)}") from error
        raise reason from None  # out of memory, or broken


def on_gpu(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device, which captures and events use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def done_by_all(agreement: Agreement, make: Callable[[], T]) -> T:
    """The result of ``make``, a capture or the allocation of its buffers, once it has succeeded in all processes; a
    failure in one of them is raised in all, CannotCapture rather than a lack of memory.
    """
    try:
        made, failed = make(), None
    except RuntimeError as error:
        if not (isinstance(error, CannotCapture) or is_out_of_memory(error)):
            raise  # the device has failed
        failed = error
    came_to = _DONE if failed is None else _CANNOT if isinstance(failed, CannotCapture) else _NO_MEMORY
    least = agreement.least(came_to)
    if failed is not None and least == came_to:
        try:
            raise failed
        finally:
            failed = None  # breaks the cycle of frame, error and traceback, which would keep buffers alive
    if least == _CANNOT:
        raise CannotCapture("another process of the model cannot capture the step")
    if least == _NO_MEMORY:
        raise torch.OutOfMemoryError("another process of the model has no memory for it")
    return made


def output_for(sampling: Sampling | None) -> GraphOutput:
    """The outputs of a graph for this sampling; one graph serves several numbers of likeliest tokens."""
    if sampling is None or (sampling.masks is not None and not (sampling.process or sampling.top)):
        return GraphOutput(samples=False, drawn=sampling is not None and sampling.drawn)  # masks arrive while it runs
    if sampling.process is not None or sampling.masks is not None:
        return GraphOutput(samples=False, uploads_batch=True)
    top = max(_FEWEST_TOP, 1 << (sampling.top - 1).bit_length()) if sampling.top else 0
    return GraphOutput(samples=True, top=top, uploads_batch=top > 0, drawn=sampling.drawn)
