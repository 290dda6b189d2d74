"""Capturing decode steps on a GPU, to be started again with one launch: the tree grows, the model runs, it samples."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from prefixkit.attention.step import Step
from prefixkit.runners.batch import Sampling
from prefixkit.runners.capture_errors import first_line, is_about_capture, reason_of
from prefixkit.runners.graph_arrays import CannotCapture, GraphArrays
from prefixkit.runners.sampler import top_tokens

# Beginning a capture waits for the whole device, which is an error while another thread captures.
_capturing = threading.Lock()
# Streams of captures that are gone, by device, the longest gone first.
_released: dict[int, deque[Any]] = {}
# Graphs give at least this many of the likeliest tokens, if any.
_FEWEST_TOP = 16


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Start it again."""


class Capture(Protocol):
    """Captures work; what it captured shares one pool of memory."""

    def __call__(self, work: Callable[[], None]) -> Graph:
        """A graph of what ``work`` does on the current stream."""

    @property
    def bytes(self) -> int:
        """GPU memory of that pool."""


class GraphOutput(NamedTuple):
    """What a captured step gives.

    Attributes:
        samples: Whether the graph samples tokens; else it gives logits.
        top: Likeliest tokens of each row that it gives beside the sampled one; 0 for none.
        uploads_batch: Whether it copies its batch from the staging buffers at each replay: batches of beams, and those
            whose logits the host processes, change at every step.
        drawn: Whether it gives the probabilities with which tokens were sampled.
    """

    samples: bool
    top: int = 0
    uploads_batch: bool = False
    drawn: bool = False


@dataclass(eq=False)
class Captured:
    """A captured step, and the logits that a replay writes, where the graph does not sample from them."""

    graph: Graph = field(init=False)
    logits: Tensor | None = None


class CudaCapture:
    """Captures CUDA graphs in a memory pool that they share.

    One thread captures at a time, and its capture is of this thread alone: others may allocate, launch and wait.  The
    stream is this object's own: torch records events on it where pinned memory that a capture has read is freed,
    which must not fall into another's capture.  Afterwards the next capture reuses it: cuBLAS holds some 32 MiB for
    every stream that it has ever seen.
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


def capture_step(
    capture: Capture, model: Callable[[Step], Tensor], arrays: GraphArrays, output: GraphOutput, step: Step
) -> Captured:
    """Capture a step over the static buffers.

    Raises:
        CannotCapture: the step does what no graph can hold.
        RuntimeError: there is no memory for it, or the device has failed.
    """
    arrays.ring.allocate_top(arrays.most_top(output.top))
    captured = Captured()

    def run() -> None:
        if output.uploads_batch:
            arrays.enqueue_copy(step.num_rows)
        arrays.advance(step.num_rows)
        logits = model(step)
        if not output.samples:
            captured.logits = logits
            return
        _, logprobs = arrays.sampler.sample(logits, output.drawn)
        if output.top:
            sampled = arrays.sampler.sampled(len(logits), output.drawn)
            arrays.ring.copy(*sampled, top_tokens(logits, output.top, logprobs))

    try:
        captured.graph = capture(run)
    except RuntimeError as error:
        reason = reason_of(error)
        if is_about_capture(reason):
            raise CannotCapture(f"a step cannot be captured in a CUDA graph: {first_line(reason)}") from error
        raise reason from None  # out of memory, or broken
    return captured


def output_for(sampling: Sampling | None) -> GraphOutput:
    """What a graph gives where tokens are sampled in this way; a graph serves several numbers of likeliest tokens."""
    if sampling is None or (sampling.masks is not None and not (sampling.process or sampling.top)):
        return GraphOutput(samples=False, drawn=sampling is not None and sampling.drawn)  # masks come as it runs
    if sampling.process is not None or sampling.masks is not None:
        return GraphOutput(samples=False, uploads_batch=True)
    top = max(_FEWEST_TOP, 1 << (sampling.top - 1).bit_length()) if sampling.top else 0
    return GraphOutput(samples=True, top=top, uploads_batch=top > 0, drawn=sampling.drawn)
