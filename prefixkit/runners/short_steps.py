"""Short steps as CUDA graphs: prompts of few tokens, and whatever else runs few query rows.

Launching a step's kernels one by one takes the host about a millisecond for each layer, and a GPU computes hundreds of
rows of most models in less, thousands of rows of small ones.  A graph holds the model's part of a step, padded to a
bucket of rows; with layers that keep a state, which padding must not enter, it holds a step of as many rows.  The tree,
the plan and the tokens are uploaded and planned before each replay, and what is done with the logits stays outside.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.agreement import Agreement
from prefixkit.attention.queries import StepTree
from prefixkit.attention.state_batches import HostBatch, state_batches
from prefixkit.attention.step import Step
from prefixkit.ops.backend import GraphPlanning, NotCapturable
from prefixkit.runners.capture import Captured, Graphs, done_by_all, graph_of, on_gpu
from prefixkit.runners.capture_errors import first_line, is_out_of_memory
from prefixkit.runners.eager import CompiledModel
from prefixkit.runners.graph_arrays import CannotCapture, ShortTree, StaticBatches
from prefixkit.runners.graph_weights import GraphWeights
from prefixkit.runners.waiting import RefuseWaiting
from prefixkit.tree.state_slots import StateMoves

log = logging.getLogger("prefixkit")

# Query rows of graphs, and rows of logits that they return.
ROWS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
OUTPUTS = (8, 32, 128, 512, 1024, 2048, 4096)
# A capture takes the host as long as some steps: only a bucket that is used again and again pays for it.
USES = 4
# The host's time to launch a layer, and the FLOP/s at which a GPU computes the rows of a step (H200: up to 6e14).
_LAUNCH_SECONDS, _FLOPS = 0.8e-3, 4e14
# Most numbers of rows with graphs, most graphs, and most kinds of steps whose uses are counted.  Only with layers that
# keep a state are there more: each number of rows then has graphs of its own, for each way to run it in batches.
MOST_SIZES, MOST_GRAPHS, MOST_COUNTED = 32, 128, 1024
# A graph takes the place of others once graphs have run this many steps since the last one did: where more kinds of
# steps come in turn than there may be graphs, captures would otherwise take longer than graphs spare.
REPLAYS = 8
# After a capture that found no memory, the next attempt is this many uses away.
_USES_LATER = 32


def most_short_rows(layers: int, weights: int) -> int:
    """Most query rows that a GPU computes while the host launches a step's kernels one by one.

    With more rows, a graph would spare nothing, and compute its padding in addition.

    Args:
        layers: The model's layers.
        weights: Numbers in all of their weights.
    """
    return int(_LAUNCH_SECONDS * layers * _FLOPS / (2 * weights))


class Bucket(NamedTuple):
    """What steps of one graph have in common.

    Attributes:
        rows: Query rows.
        outputs: Rows of logits.
        states: The kinds of the batches in which layers that keep a state run the rows; empty without such layers.
    """

    rows: int
    outputs: int
    states: tuple[Hashable, ...] = ()

    @staticmethod
    def of(rows: int, outputs: int, batches: Sequence[HostBatch] = ()) -> Bucket | None:
        """The bucket of a step; None for a step without logits, or with too many rows for any graph.

        Padding must not enter a state: with states, ``rows`` are those of the step.
        """
        if not 0 < outputs <= rows <= ROWS[-1]:
            return None
        of_rows = rows if batches else ROWS[bisect_left(ROWS, rows)]
        of_outputs = OUTPUTS[bisect_left(OUTPUTS, outputs)]
        return Bucket(of_rows, min(of_rows, of_outputs), tuple(batch.kind for batch in batches))


@dataclass(eq=False)
class ShortGraph:
    """A captured step.

    Attributes:
        captured: The graph.
        states: The static buffers of its states.
        plain: Whether it runs layers without torch.compile, though others are to be compiled.
    """

    captured: Captured
    states: StaticBatches | None
    plain: bool


class ShortSteps:
    """Captures short steps of any queries once they come again and again, and replays them.

    It holds neither runner, so that no cycle of references keeps a dropped runner and its pool.

    Args:
        model: Runs a step in a way that can be captured, through compiled layers if there are any.
        plain: The same without compiled layers.
        compiled: Says whether layers are compiled for a step; None: there are no compiled layers.
        plannings: The planning of captured steps, for the heads of each kind of layers.
        layer_counts: Number of layers of each kind.
        most_rows: Most query rows of a graph.
        graphs: Captures graphs.
        weights: Says whether the model has hooks: these run with each prompt, so that no graph may run it.
        agreement: Agreement of the processes that share the model.
        device: The device of the model.
    """

    def __init__(
        self,
        model: Callable[[Step], Tensor],
        plain: Callable[[Step], Tensor],
        compiled: CompiledModel | None,
        plannings: Sequence[GraphPlanning],
        layer_counts: tuple[int, ...],
        most_rows: int,
        graphs: Graphs,
        weights: GraphWeights,
        agreement: Agreement,
        device: torch.device,
    ) -> None:
        self.model, self.plain, self.compiled = model, plain, compiled
        self.plannings, self.layer_counts = tuple(plannings), layer_counts
        self.graphs, self._weights, self.agreement, self.device = graphs, weights, agreement, device
        self._buffers: OrderedDict[int, ShortTree] = OrderedDict()  # by rows, those used last at the end
        self._graphs: dict[Bucket, ShortGraph] = {}  # those used last at the end
        self._uses: dict[Bucket, int] = {}  # likewise
        self._most_rows = self._limit = most_rows
        self._logits: Tensor | None = None  # which graphs write, one after another
        self._replays = 0  # since a graph last took the place of others
        self._most_checked = 0  # rows of the longest step that has run without waiting for the GPU

    def drop(self, moved: bool = False) -> None:
        """Drop all graphs; those of sizes that come again are captured again, after a check: other weights or modes may
        wait for the GPU.

        ``moved``: forget how often each size has come too, so that weights that move at each call cost no captures,
        and which sizes could not be captured, as others may be with another adapter.
        """
        self._graphs.clear()
        self._most_checked, self._logits = 0, None
        if moved:
            self._uses.clear()
            self._most_rows = self._limit

    def __call__(
        self,
        tree: StepTree,
        tokens: NDArray[np.integer],
        wanted: NDArray[np.integer],
        states: StateMoves | None = None,
    ) -> tuple[Step, Tensor] | None:
        """Run a step by a graph, or capture one; returns the step and its float32 logits, or None if no graph may.

        Args:
            tree, tokens, wanted, states: As :func:`build_step` takes them.
        """
        batches = [] if states is None else state_batches(states.pieces, len(tokens))
        bucket = Bucket.of(len(tokens), len(wanted), batches)
        numbered = tree.later is not None or tree.queries.sequence is not None  # which the buffers have no room for
        if bucket is None or bucket.rows > self._most_rows or numbered or self._weights.hooked:
            return None
        with on_gpu(self.device), torch.inference_mode():
            buffers, graph = self._buffers.get(bucket.rows), self._graphs.get(bucket)
            if buffers is not None and graph is not None and buffers.holds(tree):
                step = buffers.step(tree, bucket.outputs, self.layer_counts, graph.states)
                if not (graph.plain and self._serves(step)):
                    self._buffers.move_to_end(bucket.rows)
                    self._graphs[bucket] = self._graphs.pop(bucket)
                    buffers.upload(tree, tokens, wanted)
                    if graph.states is not None:
                        graph.states.upload(batches)
                    return step, self._replay(graph.captured, len(wanted))
            if self._count(bucket) < USES or not self._makes_room(bucket):
                return None
            return self._run_and_capture(bucket, tree, tokens, wanted, batches)

    def _replay(self, captured: Captured, outputs: int) -> Tensor:
        captured.graph.replay()
        self.graphs.replays, self._replays = self.graphs.replays + 1, self._replays + 1
        assert captured.logits is not None, "it samples nothing"
        return _with_copy(captured.logits, outputs)[1]  # the next replay writes its logits there

    def _count(self, bucket: Bucket) -> int:
        """Count a use; returns how often steps of this kind have come.  Kinds that came longest ago are forgotten."""
        uses = self._uses[bucket] = self._uses.pop(bucket, 0) + 1
        if len(self._uses) > MOST_COUNTED:
            del self._uses[next(iter(self._uses))]
        return uses

    def _makes_room(self, bucket: Bucket) -> bool:
        """Whether there is room for a graph, maybe because those used longest ago have just been dropped."""
        more_rows = bucket.rows not in self._buffers and len(self._buffers) >= MOST_SIZES
        if not more_rows and (bucket in self._graphs or len(self._graphs) < MOST_GRAPHS):
            return True
        if self._replays < REPLAYS:
            return False
        self._replays = 0
        if more_rows:
            self._drop_rows(next(iter(self._buffers)))
        else:
            del self._graphs[next(iter(self._graphs))]
        return True

    def _drop_rows(self, rows: int) -> None:
        """Drop the buffers of a number of rows, and the graphs that read them."""
        self._graphs = {bucket: one for bucket, one in self._graphs.items() if bucket.rows != rows}
        self._buffers.pop(rows, None)

    def _serves(self, step: Step) -> bool:
        """Whether compiled layers run a step."""
        return self.compiled is not None and self.compiled.serves(step, compiling=False)

    def _run_and_capture(
        self,
        bucket: Bucket,
        tree: StepTree,
        tokens: NDArray[np.integer],
        wanted: NDArray[np.integer],
        batches: Sequence[HostBatch],
    ) -> tuple[Step, Tensor] | None:
        """Run a step over the static buffers, and capture it for later ones; None if it has not run.

        The step itself runs last before the capture, which runs nothing: states are advanced once.
        """
        began = time.perf_counter()
        advances = False
        try:
            buffers = self._buffers_for(bucket.rows, tree)
            states = done_by_all(self.agreement, lambda: self._static(batches)) if batches else None
            buffers.upload(tree, tokens, wanted)
            step = buffers.step(tree, bucket.outputs, self.layer_counts, states)
            if batches or bucket.rows > self._most_checked:
                done_by_all(self.agreement, lambda: self._check(step, states, batches))
                self._most_checked = max(self._most_checked, bucket.rows)  # in all processes, or in none
            if states is not None:
                states.upload(batches)
            plain = self.compiled is not None and not self._serves(step)
            model, advances = self.plain if plain else self.model, bool(batches)
            made, logits = done_by_all(self.agreement, lambda: _with_copy(_run(model, step), len(wanted)))
        except RuntimeError as error:
            # Layers may have advanced their states in place: then the step cannot run again.
            if advances or not self._give_up(bucket, error):
                raise
            return None
        try:
            captured = done_by_all(self.agreement, lambda: self._capture(model, step, made))
        except RuntimeError as error:
            if not self._give_up(bucket, error):
                raise
        else:
            self._graphs[bucket] = ShortGraph(captured, states, plain)
            self.graphs.count(f"a step of {bucket.rows} rows and {bucket.outputs} rows of logits", began)
        return step, logits

    def _static(self, batches: Sequence[HostBatch]) -> StaticBatches:
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
            return StaticBatches(batches, self.device)

    def _buffers_for(self, rows: int, tree: StepTree) -> ShortTree:
        """The buffers of a number of rows if they hold the tree; else larger ones, for which graphs are made anew."""
        least = self._buffers.get(rows)
        if least is None or not least.holds(tree):
            made = tree, rows, self.plannings, self.device, least
            with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
                buffers = done_by_all(self.agreement, lambda: ShortTree(*made))
            self._drop_rows(rows)
            self._buffers[rows] = buffers
        return self._buffers[rows]

    def _check(self, step: Step, states: StaticBatches | None, batches: Sequence[HostBatch]) -> None:
        """Run a step that advances no state; its KV is written again when the step runs.

        Raises:
            CannotCapture: the step waits for the GPU, or its attention runs in no graph.
        """
        if states is not None:
            states.upload([batch.unused() for batch in batches])
        with RefuseWaiting():  # type: ignore[no-untyped-call]
            _run(self.plain, step)

    def _capture(self, model: Callable[[Step], Tensor], step: Step, made: Tensor) -> Captured:
        """Capture a step, which makes logits like ``made``.

        Graphs write their logits to one buffer: with one for each, scores in steps of many sizes would take gigabytes.
        """
        if self._logits is None or len(self._logits) < len(made):
            with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
                self._logits = torch.empty(made.shape, dtype=made.dtype, device=made.device)
        logits = self._logits[: len(made)]
        captured = Captured(step, logits=logits)
        captured.graph = graph_of(self.graphs, lambda: _write(model(step), logits))
        return captured

    def _give_up(self, bucket: Bucket, error: RuntimeError) -> bool:
        """After a failure, capture no steps of as many rows; without memory, none of this size for some time; False
        for an error of another kind.
        """
        if is_out_of_memory(error):
            self._uses[bucket] = -_USES_LATER
            log.info("no memory for a CUDA graph of a step of %d rows: %s", bucket.rows, first_line(error))
        elif isinstance(error, CannotCapture):
            self._most_rows = bucket.rows - 1
            log.info("steps of %d rows or more run without CUDA graphs: %s", bucket.rows, first_line(error))
        else:
            return False
        return True


def _run(model: Callable[[Step], Tensor], step: Step) -> Tensor:
    """The logits of a step; CannotCapture if its attention runs in no graph."""
    try:
        return model(step)
    except NotCapturable as error:
        raise CannotCapture(str(error)) from error


def _with_copy(logits: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Logits, and a float32 copy of their first rows."""
    return logits, logits[:rows].to(torch.float32, copy=True)


def _write(made: Tensor, target: Tensor) -> None:
    target.copy_(made)
