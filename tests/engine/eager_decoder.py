"""A decoder without graphs, on any device: what decoders must do, one step after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.decode_batch import DecodeBatch
from prefixkit.attention.planner import Planner
from prefixkit.attention.staging import upload
from prefixkit.attention.step import Step
from prefixkit.runners.decode_tree import DecodeCapacity, DecodeTree
from prefixkit.runners.decoder import Sampled, decode_step
from prefixkit.sampling.specification import SamplingBatch, sample_on_host


class EagerDecoder:
    """Runs each step as it is asked for.

    Args:
        model: Runs a step.
        planner: Plans for it.
        page_size: Of the pool.
        device: Where the model runs.
    """

    def __init__(
        self, model: Callable[[Step], Tensor], planner: Planner, page_size: int, device: torch.device | str
    ) -> None:
        self.model, self.planner, self.page_size = model, planner, page_size
        self.device = torch.device(device)
        self.captures, self.seconds_capturing, self.graph_bytes, self.stale = 0, 0.0, 0, False
        self._sampled: deque[Sampled] = deque()

    def begin(self, batch: DecodeBatch, sampling: SamplingBatch, last: NDArray[np.int64]) -> None:
        self._sampled.clear()
        self._sampling, self._last = sampling, last
        self._load(batch)

    def keep(self, batch: DecodeBatch, rows: NDArray[np.intp]) -> None:
        old, self._last = self._sampling, self._last[rows]
        params, histories = [old.params[row] for row in rows], [old.histories[row] for row in rows]
        self._sampling = SamplingBatch(params, old.keys[rows], old.steps[rows], histories)
        self._load(batch)

    def _load(self, batch: DecodeBatch) -> None:
        self._batch = batch
        self._tree = DecodeTree(DecodeCapacity.of(batch), self.page_size, self.device)
        self._tree.load(batch)
        self.planned, _ = self.planner.plan(batch.tree, self.device)
        # The tree's tensors are the decode tree's own, which grow in place.
        work = upload(self.planned.plan.arrays(), self.device)
        self._step_plan = replace(self.planned, tensors=[*work, *self._tree.nodes])

    def step(self) -> None:
        sampling, tree, rows = self._sampling, self._tree, self._batch.num_rows
        tree.sampled = torch.from_numpy(self._last).to(self.device)
        tree.advance(rows)
        wanted = torch.arange(rows, device=self.device)
        logits = self.model(decode_step(self._batch, tree, wanted, self._step_plan))
        sampled, logprobs = sample_on_host(logits, sampling)
        self._last = sampled.cpu().numpy()
        histories = [np.append(old, token) for old, token in zip(sampling.histories, self._last, strict=True)]
        self._sampling = replace(sampling, steps=sampling.steps + 1, histories=histories)
        self._sampled.append((self._last, logprobs.cpu().numpy()))

    def read(self) -> Sampled:
        return self._sampled.popleft()
