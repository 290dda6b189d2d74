"""The static buffers that captured steps read and write: for batches up to a size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.gpu.staging import Staged, upload
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.state_batches import HostBatch, StateBatch
from prefixkit.attention.step import Step, slots_of
from prefixkit.ops.backend import GraphPlanning, StaticPlans
from prefixkit.ops.sampling_records import MOST_VOCAB
from prefixkit.runners.batch import Results
from prefixkit.runners.decode_tree import DecodeTree, StagedTree, TreeCapacity
from prefixkit.runners.kind_plans import KindPlans, kind_plans, more_than
from prefixkit.runners.sampler import Sampler
from prefixkit.sampling.specification import GREEDY, SamplingBatch
from prefixkit.tree.state_slots import StateMoves

# The rows of a step are rounded up to those of a bucket: by less than half, except in the smallest buckets.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
_STEP_OF_LARGE = 512
# Most steps whose tokens are being copied to the host.
_RING = 16


def bucket_of(rows: int) -> int:
    """The smallest bucket that holds ``rows`` rows."""
    for size in BUCKETS:
        if rows <= size:
            return size
    return -(-rows // _STEP_OF_LARGE) * _STEP_OF_LARGE


class CannotCapture(RuntimeError):
    """A model's steps cannot run in CUDA graphs; no step has run."""


class Ring:
    """Host memory for the results of recent steps, pinned if they run on a GPU, and the events of their copies."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.tokens, self.logprobs = self._buffers(_RING, rows)
        _, self.drawn = self._buffers(_RING, rows, 2)
        events = range(_RING if self._on_gpu else 0)
        self._ready = [torch.cuda.Event() for _ in events]  # type: ignore[no-untyped-call]
        self._top = {0: self._buffers(rows, 0)}
        self._rows, self._sent = rows, 0

    def allocate_top(self, count: int) -> None:
        """Allocate memory for the ``count`` likeliest tokens of one step; steps with such tokens never run ahead."""
        if count not in self._top:
            self._top[count] = self._buffers(self._rows, count)

    def copy(
        self, tokens: Tensor, logprobs: Tensor, drawn: Tensor | None, top: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Copy a step's rows to the next index, or with ``top`` to the first, which a CUDA graph can capture."""
        index, rows = 0 if top is not None else self._sent % _RING, len(tokens)
        self.tokens[index, :rows].copy_(tokens, non_blocking=True)
        self.logprobs[index, :rows].copy_(logprobs, non_blocking=True)
        if drawn is not None:
            self.drawn[index, :rows].copy_(drawn, non_blocking=True)
        if top is not None:
            for host, device in zip(self._top[top[0].shape[1]], top, strict=True):
                host[:rows].copy_(device, non_blocking=True)

    def record(self, first: bool) -> int:
        """Record that a step's copies are enqueued; returns their index, which is 0 where it is the ``first``."""
        self._sent = 0 if first else self._sent
        index = self._sent % _RING
        if self._on_gpu:
            self._ready[index].record()
        self._sent += 1
        return index

    def wait(self) -> None:
        """Wait for the step recorded last."""
        if self._on_gpu:
            self._ready[(self._sent - 1) % _RING].synchronize()

    def sampled(self, index: int, rows: int) -> NDArray[np.int64]:
        """``[rows]`` the tokens of a step, once they are copied."""
        if self._on_gpu:
            self._ready[index].synchronize()
        tokens: NDArray[np.int64] = self.tokens[index, :rows].numpy().copy()
        return tokens

    def read(self, index: int, rows: int, top: int, count: int, drawn: bool) -> Results:
        """A step's results, once they are copied, with the first ``count`` of its ``top`` copied likeliest tokens, and
        with the ``drawn`` probabilities, if it copied these.
        """
        ids, logprobs = self._top[top]
        sampled = self.sampled(index, rows), self.logprobs[index, :rows].numpy().copy()
        how = self.drawn[index, :rows].numpy().copy() if drawn else None
        return Results(*sampled, ids[:rows, :count].numpy().copy(), logprobs[:rows, :count].numpy().copy(), how)

    def _buffers(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Zeros for tokens and for log-probabilities."""
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
            tokens = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=self._on_gpu)
            return tokens, torch.zeros(shape, dtype=torch.float32, device="cpu", pin_memory=self._on_gpu)


class StaticBatches:
    """The batches of captured steps, in static buffers: those of all steps whose batches are of the same kinds.

    Attributes:
        batches: On the device.
    """

    def __init__(self, batches: Sequence[HostBatch], device: torch.device) -> None:
        self._staged = Staged([(2 * len(array),) for batch in batches for array in batch.arrays], device)
        uploaded = iter([one.view(torch.int64) for one in self._staged.tensors])
        self.batches = tuple(batch.on_device(uploaded) for batch in batches)

    def upload(self, batches: Sequence[HostBatch]) -> None:
        """Upload a step's rows and slots, on the current stream."""
        arrays = chain.from_iterable(batch.arrays for batch in batches)
        for staged, array in zip(self._staged.writable(), arrays, strict=True):
            staged.view(np.int64)[:] = array
        self._staged.upload()


class GraphArrays:
    """The static buffers of graphs, for trees up to some size and up to ``rows`` rows, the size of a bucket.

    The buffers hold trees somewhat larger than ``tree``, with at least ``pages`` pages of all nodes.
    """

    sampler: Sampler  # made before the first graph

    def __init__(
        self,
        tree: StepTree,
        rows: int,
        plannings: Sequence[GraphPlanning],
        page_size: int,
        device: torch.device,
        keep_states: bool = False,
        pages: int = 0,
    ) -> None:
        need = TreeCapacity.of(tree)
        self.rows = rows
        capacity = TreeCapacity(rows, more_than(need.nodes) + rows - need.rows, max(pages, more_than(need.pages)))
        self.tree = DecodeTree(capacity, page_size, device)
        self.kinds: list[StaticPlans] = []
        for planning in plannings:
            kind = planning.static_plans(tree, rows, capacity.nodes, device)
            self.kinds.append(kind_plans(planning, tree, rows, self.tree) if kind is None else kind)
        self.wanted = torch.arange(rows, device=device)
        # Slots of the states before and after a step; 0 in unused rows.
        self._states = torch.zeros((2, rows), dtype=torch.int64, device=device) if keep_states else None
        self.ring = Ring(rows, device)
        self._beams = 0  # rows of the sampler, if all of them are beams
        self._staged_tokens = torch.zeros(rows, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")

    def __del__(self) -> None:
        """Wait: pinned memory must outlive the last replay that reads it, and torch does not know of replays."""
        if hasattr(self, "ring"):
            self.ring.wait()

    def holds(self, tree: StepTree) -> bool:
        return self.tree.capacity.holds(TreeCapacity.of(tree)) and all(kind.holds(tree) for kind in self.kinds)

    def plans(self, tree: StepTree) -> tuple[StepPlan, ...]:
        """The plans, one for each kind of layers, of a tree that is or will be uploaded."""
        return tuple(kind.plan_of(tree) for kind in self.kinds)

    def make_sampler(self, vocab: int) -> None:
        if not hasattr(self, "sampler"):
            if vocab > MOST_VOCAB:
                raise CannotCapture(f"the sampling kernel serves up to {MOST_VOCAB} tokens, the model has {vocab}")
            with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
                self.sampler = Sampler(self.rows, vocab, self.tree.leaf.device)
            self.tree.sampled = self.sampler.tokens

    def most_top(self, count: int) -> int:
        """``count``, or the size of the vocabulary if that is smaller."""
        return min(count, self.sampler.vocab)

    def upload_sampling(self, sampling: SamplingBatch) -> None:
        """Upload the sampling parameters of a batch's rows; those of beams, equal at every step, only once."""
        sampler, rows = self.sampler, len(sampling.params)
        beams = rows if all(params is GREEDY for params in sampling.params) else 0
        if not beams or beams != self._beams:
            sampler.active.zero_()
            sampler.upload_params(slice(0, rows), sampling)
        self._beams = beams

    def stage(self, tree: StepTree, tokens: NDArray[np.integer]) -> None:
        """Stage a decode step, and the tokens that it runs, for :meth:`enqueue_copy`.

        Raises:
            BatchTooLarge, PlanTooLarge: the step does not fit; no graph has been launched.
        """
        self.ring.wait()  # for the last replay to have read the staging buffers
        for kind in self.kinds:
            kind.stage(tree)
        self.tree.stage(tree)
        self._staged_tokens.numpy()[: len(tokens)] = tokens

    def enqueue_copy(self, rows: int) -> None:
        """Copy the step staged last to the device, and plan it, on the current stream.  Can be captured."""
        self.tree.enqueue_copy()
        for kind in self.kinds:
            kind.enqueue_copy()
        self.sampler.tokens[:rows].copy_(self._staged_tokens[:rows], non_blocking=True)

    def upload_tokens(self, tokens: NDArray[np.integer]) -> None:
        """Upload the tokens that the first step of a batch runs."""
        self.sampler.tokens[: len(tokens)] = upload([tokens.astype(np.int64)], self.tree.leaf.device)[0]

    def states(self, rows: int) -> tuple[StateBatch, ...]:
        """The state slots of a captured step, for layers that keep a state; empty without such layers."""
        if self._states is None:
            return ()
        source, target = self._states[:, :rows]
        return (StateBatch(1, None, source, target, None),)

    def upload_states(self, states: StateMoves | None) -> None:
        """Upload the slots of a decode step's rows, on the current stream."""
        if self._states is not None and states is not None:
            _, _, source, target, _ = zip(*states.pieces, strict=True)
            self._states.zero_()
            self._states[:, : len(source)] = upload([np.array((source, target), np.int64)], self._states.device)[0]

    def continue_states(self) -> None:
        """Let the next step read states from the slots that the last step wrote."""
        if self._states is not None:
            self._states[0].copy_(self._states[1])

    def upload_tree(self, tree: StepTree) -> None:
        """Upload the tree of decode steps and plan them, on the current stream."""
        self.tree.upload(tree)
        for kind in self.kinds:
            kind.upload(tree)

    def replan(self, tree: StepTree) -> None:
        """Plan again for a tree whose leaves have grown."""
        for kind in self.kinds:
            kind.replan(tree)

    def advance(self, rows: int) -> None:
        """Start the next step of the first ``rows`` rows, on the current stream.  Can be captured."""
        self.tree.advance(rows)
        for kind in self.kinds:
            kind.advance()

    def clear(self) -> None:
        """Empty the buffers: the next step then has no rows and does no work."""
        self.tree.leaf.fill_(-1)
        self.tree.tokens.zero_()
        self.tree.positions.zero_()
        self.tree.slots.fill_(-1)
        if self._states is not None:
            self._states.zero_()
        for kind in self.kinds:
            kind.clear()


class ShortTree(StagedTree):
    """The tree, the tokens and the plans of short steps, in static buffers.

    The buffers hold trees somewhat larger than ``tree``, and what ``least`` holds, the buffers that these replace.

    Attributes:
        kinds: The plans of each kind of layers.
        tokens, positions, slots: ``[rows]`` int64, of the step uploaded last; rows beyond its own write nothing.
        wanted: ``[rows]`` int64 rows whose logits are wanted; the last one is repeated.
    """

    def __init__(
        self,
        tree: StepTree,
        rows: int,
        plannings: Sequence[GraphPlanning],
        device: torch.device,
        least: ShortTree | None = None,
    ) -> None:
        need = TreeCapacity.of(tree)
        nodes, pages = more_than(need.nodes), more_than(need.pages)
        if least is not None:
            nodes, pages = max(nodes, least.capacity.nodes), max(pages, least.capacity.pages)
        super().__init__(TreeCapacity(rows, nodes, pages), device, [(2 * rows,)] * 4)
        views = [one.view(torch.int64) for one in self._staged.tensors[5:]]
        self.tokens, self.positions, self.slots, self.wanted = views
        before = [None] * len(plannings) if least is None else [kind.planner.capacity for kind in least.kinds]
        self.kinds: list[KindPlans] = [
            kind_plans(one, tree, rows, self, size, now=True) for one, size in zip(plannings, before, strict=True)
        ]

    def holds(self, tree: StepTree) -> bool:
        """Whether a step of this tree fits."""
        return self.capacity.holds(TreeCapacity.of(tree)) and all(kind.holds(tree) for kind in self.kinds)

    def upload(self, tree: StepTree, tokens: NDArray[np.integer], wanted: NDArray[np.integer]) -> None:
        """Upload a step's tree, its tokens and the rows whose logits are wanted, and plan it, on the current stream."""
        count, arrays = len(tokens), self._stage_nodes(tree, tree.length)
        columns = (tokens, tree.positions, slots_of(tree), wanted)
        for array, column, unused in zip(arrays, columns, (0, 0, -1, wanted[-1]), strict=True):
            array.view(np.int64)[: len(column)], array.view(np.int64)[len(column) :] = column, unused
        assert count <= self.capacity.rows, "it fits"
        self._staged.upload()
        for kind in self.kinds:
            kind.upload(tree)

    def step(
        self, tree: StepTree, outputs: int, layer_counts: tuple[int, ...], states: StaticBatches | None = None
    ) -> Step:
        """The step over these buffers, with the lengths of ``tree``, which returns ``outputs`` rows of logits."""
        return Step(
            tokens=self.tokens,
            positions=self.positions,
            slots=self.slots,
            logit_rows=self.wanted[:outputs],
            length=tree.length,
            plans=tuple(kind.plan_of(tree) for kind in self.kinds),
            layer_counts=layer_counts,
            states=() if states is None else states.batches,
        )
