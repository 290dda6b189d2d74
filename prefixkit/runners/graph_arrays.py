"""What captured decode steps read and write, at addresses that stay: for batches up to a size."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.capacity import PlanCapacity
from prefixkit.attention.queries import StepTree
from prefixkit.attention.staging import upload
from prefixkit.ops.backend import GraphPlanning
from prefixkit.ops.sampling_records import MOST_VOCAB
from prefixkit.runners.batch import Sampled
from prefixkit.runners.decode_tree import DecodeCapacity, DecodeTree
from prefixkit.runners.sampler import Sampler
from prefixkit.sampling.specification import SamplingBatch

# Rows of a step are rounded up to a bucket's: by less than half of them, but for the smallest.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
_STEP_OF_LARGE = 512
# Steps whose tokens are on their way to the host, at most.
_RING = 16


def bucket_of(rows: int) -> int:
    """The smallest bucket that holds so many rows."""
    for size in BUCKETS:
        if rows <= size:
            return size
    return -(-rows // _STEP_OF_LARGE) * _STEP_OF_LARGE


class CannotCapture(RuntimeError):
    """A model's steps cannot run in CUDA graphs; nothing has run."""


class Ring:
    """The host's memory for what recent steps sampled, and when it is there; pinned where they run on a GPU."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.tokens, self.logprobs = self._buffers(_RING, rows)
        self._ready = [torch.cuda.Event() for _ in range(_RING)] if self._on_gpu else []  # type: ignore[no-untyped-call]
        self._top: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows, self._sent = rows, 0

    def send(self, tokens: Tensor, logprobs: Tensor, top: tuple[Tensor, Tensor]) -> int:
        """Copy a step's rows on the current stream; returns where they will be.

        Of ``top`` only the last step's are kept: steps that have some are not started ahead.
        """
        place, (rows, count) = self._sent % _RING, top[0].shape
        self.tokens[place, :rows].copy_(tokens, non_blocking=True)
        self.logprobs[place, :rows].copy_(logprobs, non_blocking=True)
        if count:
            if count not in self._top:
                self._top[count] = self._buffers(self._rows, count)
            for here, there in zip(self._top[count], top, strict=True):
                here[:rows].copy_(there, non_blocking=True)
        if self._on_gpu:
            self._ready[place].record()
        self._sent += 1
        return place

    def read(self, place: int, rows: int, top: int, count: int) -> Sampled:
        """A step's rows, once they are there, with the first ``count`` of the ``top`` tokens that it sent."""
        if self._on_gpu:
            self._ready[place].synchronize()
        ids, logprobs = self._top[top] if top else self._buffers(rows, 0)
        sampled = self.tokens[place, :rows].numpy().copy(), self.logprobs[place, :rows].numpy().copy()
        return Sampled(*sampled, ids[:rows, :count].numpy().copy(), logprobs[:rows, :count].numpy().copy())

    def _buffers(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Zeros for tokens and for log-probabilities."""
        return (
            torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=self._on_gpu),
            torch.zeros(shape, dtype=torch.float32, device="cpu", pin_memory=self._on_gpu),
        )


class GraphArrays:
    """Everything that graphs read and write, for trees up to some size and up to ``rows`` rows, a bucket's."""

    def __init__(
        self, tree: StepTree, rows: int, planning: GraphPlanning, page_size: int, device: torch.device
    ) -> None:
        need = DecodeCapacity.of(tree)
        self.first = tree
        self.rows = rows
        capacity = DecodeCapacity(rows, _more(need.nodes) + rows - need.rows, _more(need.pages))
        self.tree = DecodeTree(capacity, page_size, device)
        plan = planning.capacity_for(tree)
        self.planner = planning.planner(capacity.nodes, _with_slack(plan, rows), device)
        self.wanted = torch.arange(rows, device=device)
        self.ring = Ring(rows, device)
        self.sampler: Sampler | None = None
        self._planning = planning

    def holds(self, tree: StepTree) -> bool:
        if not self.tree.capacity.holds(DecodeCapacity.of(tree)):
            return False
        return self.planner.capacity.holds(self._planning.capacity_for(tree))

    def make_sampler(self, vocab: int) -> None:
        if self.sampler is None:
            if vocab > MOST_VOCAB:
                raise CannotCapture(f"the sampling kernel serves up to {MOST_VOCAB} tokens, the model has {vocab}")
            with torch.inference_mode(False):  # tensors born in inference mode could not be written outside it
                self.sampler = Sampler(self.rows, vocab, self.tree.leaf.device)
            self.tree.sampled = self.sampler.tokens

    def start(self, sampling: SamplingBatch, last: NDArray[np.integer]) -> None:
        """Bring the sampling parameters of a batch's rows, and their last tokens."""
        sampler, count = self.sampler, len(last)
        assert sampler is not None, "made before the first graph"
        sampler.active.zero_()
        if any(params is not None for params in sampling.params):
            sampler.load(slice(0, count), sampling)
        sampler.tokens[:count] = upload([last.astype(np.int64)], self.tree.leaf.device)[0]

    def load(self, tree: StepTree) -> None:
        """Bring the tree of decode steps and plan them, on the current stream."""
        self.tree.load(tree)
        self.planner.load(tree)
        self.planner.plan()

    def replan(self) -> None:
        """Plan anew for the lengths that nodes have by now."""
        nodes = self.planner.nodes
        self.planner.length[:nodes].copy_(self.tree.nodes[1][:nodes])
        self.planner.plan()

    def clear(self) -> None:
        """No rows, no work."""
        self.tree.leaf.fill_(-1)
        self.tree.tokens.zero_()
        self.tree.positions.zero_()
        self.tree.slots.fill_(-1)
        self.planner.work[0].zero_()


def _more(n: int) -> int:
    return n + n // 4 + 64


def _with_slack(need: PlanCapacity, rows: int) -> PlanCapacity:
    """Capacity for plans of other trees too."""
    sizes = (need.tile_items, need.decode_items, need.segments, need.partials)
    tile_items, decode_items, segments, partials = (_more(size * rows // max(1, need.rows)) for size in sizes)
    return PlanCapacity(tile_items, decode_items, segments, rows, partials)
