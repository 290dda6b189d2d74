"""What captured decode steps read and write, at addresses that stay: for batches up to a size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.capacity import PlanCapacity
from prefixkit.attention.decode_batch import DecodeBatch
from prefixkit.attention.staging import upload
from prefixkit.ops.backend import GraphPlanning
from prefixkit.ops.sampling_records import MOST_VOCAB
from prefixkit.runners.decode_tree import DecodeCapacity, DecodeTree
from prefixkit.runners.decoder import CannotDecode
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


@dataclass(eq=False)
class Ring:
    """Pinned memory for what recent steps sampled, and when it is there."""

    tokens: Tensor
    logprobs: Tensor
    ready: list[torch.cuda.Event]
    sent: int = 0

    @staticmethod
    def of(rows: int) -> Ring:
        tokens = torch.zeros((_RING, rows), dtype=torch.int64, pin_memory=True)
        logprobs = torch.zeros((_RING, rows), dtype=torch.float32, pin_memory=True)
        return Ring(tokens, logprobs, [torch.cuda.Event() for _ in range(_RING)])  # type: ignore[no-untyped-call]

    def send(self, tokens: Tensor, logprobs: Tensor) -> int:
        """Copy a step's rows on the current stream; returns where they will be."""
        place = self.sent % _RING
        self.tokens[place, : len(tokens)].copy_(tokens, non_blocking=True)
        self.logprobs[place, : len(tokens)].copy_(logprobs, non_blocking=True)
        self.ready[place].record()
        self.sent += 1
        return place


class GraphArrays:
    """Everything that graphs read and write, for batches up to a size."""

    def __init__(self, batch: DecodeBatch, planning: GraphPlanning, page_size: int, device: torch.device) -> None:
        need, rows = DecodeCapacity.of(batch), bucket_of(batch.num_rows)
        self.first = batch
        self.rows = rows
        capacity = DecodeCapacity(rows, _more(need.nodes) + rows - need.rows, _more(need.pages))
        self.tree = DecodeTree(capacity, page_size, device)
        plan = planning.capacity_for(batch.tree)
        self.planner = planning.planner(capacity.nodes, _with_slack(plan, rows), device)
        self.wanted = torch.arange(rows, device=device)
        self.ring = Ring.of(rows)
        self.sampler: Sampler | None = None
        self._planning = planning

    def holds(self, batch: DecodeBatch) -> bool:
        if not self.tree.capacity.holds(DecodeCapacity.of(batch)):
            return False
        return self.planner.capacity.holds(self._planning.capacity_for(batch.tree))

    def make_sampler(self, vocab: int) -> None:
        if self.sampler is None:
            if vocab > MOST_VOCAB:
                raise CannotDecode(f"the sampling kernel serves up to {MOST_VOCAB} tokens, the model has {vocab}")
            with torch.inference_mode(False):  # tensors born in inference mode could not be written outside it
                self.sampler = Sampler(self.rows, vocab, self.tree.leaf.device)
            self.tree.sampled = self.sampler.tokens

    def start(self, sampling: SamplingBatch, last: NDArray[np.int64]) -> None:
        """Bring the sampling parameters of a batch's rows, and their last tokens."""
        sampler, count = self.sampler, len(last)
        assert sampler is not None, "made before the first graph"
        sampler.active.zero_()
        sampler.load(slice(0, count), sampling)
        sampler.tokens[:count] = upload([last], self.tree.leaf.device)[0]

    def load(self, batch: DecodeBatch) -> None:
        """Bring a batch and plan it, on the current stream."""
        self.tree.load(batch)
        self.planner.load(batch.tree)
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
