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
from prefixkit.runners.decoder import Drawn, Laws, decode_step
from prefixkit.sampling.rng import uniforms
from prefixkit.sampling.specification import draw


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
        self._drawn: deque[Drawn] = deque()

    def begin(self, batch: DecodeBatch, laws: Laws) -> None:
        self._drawn.clear()
        self._laws = laws
        self._load(batch)

    def keep(self, batch: DecodeBatch, rows: NDArray[np.intp]) -> None:
        self._laws = self._laws.keep(rows)
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
        laws, tree, rows = self._laws, self._tree, self._batch.num_rows
        tree.drawn = torch.from_numpy(laws.last).to(self.device)
        tree.advance(rows)
        wanted = torch.arange(rows, device=self.device)
        logits = self.model(decode_step(self._batch, tree, wanted, self._step_plan))
        drawn, logprobs = draw(logits, laws.params, uniforms(laws.keys, laws.steps), laws.histories)
        last = drawn.cpu().numpy()
        histories = [np.append(old, np.int32(token)) for old, token in zip(laws.histories, last, strict=True)]
        self._laws = replace(laws, steps=laws.steps + 1, histories=histories, last=last)
        self._drawn.append((last, logprobs.cpu().numpy()))

    def read(self) -> Drawn:
        return self._drawn.popleft()
