"""The expanded part of captured decode steps: its plan, and K and V in static buffers that graphs read."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch

from prefixkit.attention.gpu.capacity import FEWEST_ENTRIES, PlanTooLarge
from prefixkit.attention.gpu.latent_cost import Expanded, made_bytes
from prefixkit.attention.gpu.staging import Staged, upload
from prefixkit.attention.latent_parts import LatentPart, PartRows
from prefixkit.attention.plan import Plan
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.backends.cuda.latents.expansion import (
    PAGE,
    ExpandedTokens,
    Expansion,
    expand,
    expanded_tokens,
)
from prefixkit.tree.arrays import Ints

log = logging.getLogger("prefixkit")

# A plan, the tokens that it reads, the choice of nodes, and the row of each query row's state, -1 for none.
_Planned = tuple[Plan, ExpandedTokens, Expanded, Ints]


class PartPlanner(Protocol):
    """The planner of the expanded part (see ``LatentPlanner``)."""

    part: LatentPart

    def chosen(self, tree: StepTree) -> Expanded: ...

    def rows_of(self, tree: StepTree, expanded: Expanded) -> PartRows: ...

    def plan_of(self, tree: StepTree, rows: PartRows) -> Plan: ...


class StaticExpansion(Expansion):
    """Expanded K and V in static buffers for ``capacity`` pages.

    If K and V are kept, they are made outside of graphs, when the tokens change; otherwise each graph makes them.
    """

    def __init__(self, part: LatentPart, capacity: int, device: torch.device) -> None:
        super().__init__(part, torch.zeros(capacity * PAGE, dtype=torch.int64, device=device), None)

    def change(self, tokens: ExpandedTokens, keeps: bool) -> None:
        """Hold these tokens: if they differ from those held, K and V are made on the current stream."""
        self.set_keeps(keeps)
        (slots,) = upload([tokens.slots], self.slots.device)
        self.slots[: len(slots)].copy_(slots)
        key = tokens.key if self.keeps else None  # each graph makes them: those kept are of other tokens from now on
        if key is not None and key == self.key:
            return
        self.key = None  # without memory for what making them takes, K and V stay unfinished
        if self.keeps and tokens.nodes[1].any():
            kept = len(tokens.slots) * made_bytes(self.part) * len(self._kept)
            log.info("attention over latents: K and V of %d tokens are kept, %.0f MB", len(tokens.slots), kept / 1e6)
            with torch.inference_mode():  # the buffers were made in inference mode
                for pages, maps, made in self._kept.values():
                    expand(pages, maps, self.slots, made)
        self.key = key


class StaticExpanded:
    """The plans of the expanded part over static buffers (see ``StaticPlans``), made on the host.

    The plans stay the same as leaves grow, because a decode step expands only nodes above its queries.
    """

    def __init__(self, planner: PartPlanner, tree: StepTree, rows: int, nodes: int, device: torch.device) -> None:
        self._planner = planner
        plan, tokens, _, _ = self._planned(tree)
        self._sizes = [(_more(len(of)), *of.shape[1:]) for of in plan.arrays()]
        self._sizes[0], self._sizes[4] = (8,), (rows + 1,)
        self._pages, self._nodes = _more(len(tokens.slots) // PAGE), max(nodes, FEWEST_ENTRIES)
        of_nodes = [(self._nodes,), (self._nodes,), (self._nodes + 1,), (self._pages,), (self._nodes,)]
        self._staged = Staged([*self._sizes, *of_nodes, (rows,)], device)
        self.expansion = StaticExpansion(planner.part, self._pages, device)
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=device)

    def holds(self, tree: StepTree) -> bool:
        plan, tokens, _, _ = self._planned(tree)
        fits = all(len(array) <= size[0] for array, size in zip(plan.arrays(), self._sizes, strict=True))
        return fits and len(tokens.slots) <= self._pages * PAGE and tree.snapshot.num_nodes <= self._nodes

    def plan_of(self, tree: StepTree) -> StepPlan:
        plan, _, chosen, _ = self._planned(tree)
        rows = None if chosen.nodes.any() else self._no_rows
        self.expansion.set_keeps(chosen.keeps)
        return StepPlan(self._staged.tensors, tree, lambda: plan, owners=self.expansion, rows=rows)

    def stage(self, tree: StepTree) -> None:
        plan, tokens, chosen, place = self._planned(tree)
        if not self.holds(tree):
            raise PlanTooLarge("what is expanded of this tree does not fit its buffers; capture graphs anew")
        for target, array in zip(self._staged.writable(), (*plan.arrays(), *tokens.nodes, place), strict=True):
            target[: len(array)] = array
            if target.ndim == 1 and len(array):
                target[len(array) :] = array[-1]
        self._staged.arrays[-1][len(place) :] = -1
        self.expansion.change(tokens, chosen.keeps)

    def upload(self, tree: StepTree) -> None:
        self.stage(tree)
        self._staged.upload()

    def enqueue_copy(self) -> None:
        self._staged.enqueue_copy()

    def replan(self, tree: StepTree) -> None:
        """Does nothing: leaves are not expanded."""

    def advance(self) -> None:
        """Does nothing."""

    def clear(self) -> None:
        self._staged.tensors[0].zero_()

    def _planned(self, tree: StepTree) -> _Planned:
        """The plan of all query rows of a tree, some perhaps outside this part; the last tree's plan is remembered."""
        if self._last is None or self._last[0] is not tree:
            chosen = self._planner.chosen(tree)
            rows = self._planner.rows_of(tree, chosen)
            place = np.full(tree.queries.num_rows, -1, np.int32)
            place[rows.index] = rows.index
            whole = rows.over(tree)
            made = self._planner.plan_of(tree, whole), expanded_tokens(tree, whole.bsr), chosen, place
            self._last = tree, made
        return self._last[1]

    _last: tuple[StepTree, _Planned] | None = None


def _more(n: int) -> int:
    return n + n // 8 + 8
