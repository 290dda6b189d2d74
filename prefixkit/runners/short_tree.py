"""The static buffers of short steps: their trees, tokens and plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import Step, slots_of
from prefixkit.ops.backend import GraphPlanning
from prefixkit.runners.decode_tree import StagedTree, TreeCapacity
from prefixkit.runners.graph_arrays import StaticBatches
from prefixkit.runners.kind_plans import KindPlans, kind_plans, more_than


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
