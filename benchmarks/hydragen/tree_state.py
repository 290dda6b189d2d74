"""A case's decode step, in tensors that stay while its sequences grow: so one captured graph serves all lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from benchmarks.hydragen.cases import Case, CaseTree
from prefixkit.attention.bsr import Queries
from prefixkit.attention.capacity import capacity_for
from prefixkit.attention.sharing import CostModel, HeadShape
from prefixkit.attention.step import Step, build_step, planner_for
from prefixkit.tree.snapshot import TreeSnapshot

# By this cost nothing is worth sharing.
NEVER = CostModel(item=1e30, kv_byte=0.0, partial_byte=0.0)


class TreeState:
    """The step of a case at any number of drawn tokens.

    Attributes:
        case, tree: What decodes.
        step: At the length of the last :meth:`at`.
        plans: How many plans were made: one for each length.
    """

    def __init__(
        self, case: Case, shape: HeadShape, device: torch.device, dtype: torch.dtype, share: bool = True
    ) -> None:
        self.case, self.tree, self._device = case, CaseTree.of(case), device
        self._planner = planner_for(shape, device, dtype)
        if not share:
            self._planner.cost, self._planner.gpu = NEVER, replace(self._planner.gpu, sharing=NEVER)
        self._snapshot, self._queries = self._grown(case.new)
        self._planner.launch = None  # numpy plans, by the cost above
        self._work = self._room_for_plans()
        self.step = self._build()

    @property
    def plans(self) -> int:
        return self._planner.plans_made

    def at(self, drawn: int) -> None:
        """Let each sequence have drawn so many tokens; the last of them asks in this step."""
        self._snapshot, self._queries = self._grown(drawn)
        kept, now = self.step, self._build()
        for there, new in zip(_tensors(kept), _tensors(now), strict=True):
            there.copy_(new)
        self.step = replace(
            now,
            tokens=kept.tokens,
            positions=kept.positions,
            slots=kept.slots,
            nodes=kept.nodes,
            logit_rows=kept.logit_rows,
        )

    def _grown(self, drawn: int) -> tuple[TreeSnapshot, Queries]:
        full, leaf = self.tree.snapshot, self.tree.nodes[-1]
        length = full.length.copy()
        length[leaf] = self.case.private + drawn
        ready = length.copy()
        ready[leaf] -= 1
        # Another version for each length: plans are made anew.
        snapshot = replace(full, version=drawn, length=length, ready=ready)
        return snapshot, Queries(leaf, length[leaf] - 1, length[leaf])

    def _build(self) -> Step:
        rows = np.arange(self.case.batch, dtype=np.int64)
        step = build_step(self._snapshot, self._queries, rows % 251, rows, self._planner, self._device)
        if self._work is None:
            return step
        for there, new in zip(self._work, step.work, strict=True):
            there[: len(new)].copy_(new)
        return replace(step, planned=replace(step.planned, work=self._work))

    def _room_for_plans(self) -> list[torch.Tensor] | None:
        """Tensors that hold the plan of any length, at addresses that stay; None where no graph can take a plan."""
        planner = self._planner
        if planner.num_sms is None:
            return None
        room = capacity_for(self._snapshot, self._queries, planner.shape, planner.num_sms, planner.gpu)
        return [torch.zeros(shape, dtype=torch.int32, device=self._device) for shape in room.shapes()]


def _tensors(step: Step) -> list[torch.Tensor]:
    return [step.positions, step.slots, *step.nodes]
