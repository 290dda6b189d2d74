"""Planning: from a tree and the queries of a step to what the attention op takes, cached while the tree stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.bsr import BSR, decompose_unchecked
from prefixkit.attention.paths.runs import runs_of
from prefixkit.attention.plan import Plan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CostModel, HeadShape
from prefixkit.attention.visible import ALL, Visible
from prefixkit.tree.arrays import Ints

Array = NDArray[np.signedinteger]
# Makes the arrays of a step that are uploaded together with its plan; called once the queries are checked.
StepArrays = Callable[[], Sequence[Array]]
# As leaves grow, what a plan reads falls out of sight: at most this number of tokens of each BSR row, one KV tile.
MOST_UNSEEN = 64


@dataclass(eq=False)
class StepPlan:
    """The plan of one step: opaque tensors for the attention op, and what is known of it on the host.

    Attributes:
        tensors: What ``tree_attention`` takes as ``plan``; only the backend that made them reads them.
        tree: What was planned for.
        specify: The plan on the host; called when it is first needed, and cheap when called again.
        count_reads: Token KVs that a run over all heads reads when node ``n`` holds ``length[n]`` tokens; None counts
            them from the plan on the host.
        owners: What the backend needs for as long as the tensors are used.
        visible: Which tokens queries see.
        rows: ``[rows]`` int64 on the device which of the step's query rows it computes, maybe none; None: all.
        adds: What it reads comes on top of what another plan reads for the same layers.
    """

    tensors: list[Tensor]
    tree: StepTree
    specify: Callable[[], Plan]
    count_reads: Callable[[Ints], int] | None = None
    owners: object = None
    visible: Visible = ALL
    rows: Tensor | None = None
    adds: bool = False

    @cached_property
    def plan(self) -> Plan:
        """The plan on the host; where a GPU made it, the first access makes the same plan in numpy."""
        return self.specify()

    def kv_tokens(self, tree: StepTree) -> tuple[int, int]:
        """Token KVs that attention reads in one layer over a tree of this structure, and would read unshared, which no
        plan counts that adds to another over the same tokens.
        """
        if self.adds and self.visible.until is None:
            return self.kv_tokens_read(tree.length), 0
        return self.kv_tokens_read(tree.length), int(self.visible.count(tree.positions).sum())

    def kv_tokens_read(self, length: Ints) -> int:
        """Token KVs that attention reads in one layer, when node ``n`` holds ``length[n]`` tokens."""
        return self.plan.kv_tokens_read(length) if self.count_reads is None else self.count_reads(length)


class Planner(ABC):
    """Plans steps for the heads of one model, and reuses the last plan while the tree and the query counts stand.

    A backend subclasses it: :meth:`specify` makes the plan on the host, :meth:`_make` uploads one, and :meth:`_renew`
    adapts the last one to a step of the same tree.

    Attributes:
        shape: The attention heads.
        cost: Decides what is shared.
        visible: What queries see; nothing before it is read.
        plans_made: How many plans were made, for tests and reports.
    """

    def __init__(self, shape: HeadShape, cost: CostModel, visible: Visible = ALL) -> None:
        self.shape, self.cost, self.visible = shape, cost, visible
        self.plans_made = 0
        self._key: tuple[object, ...] | None = None
        self._begin: NDArray[np.int64] | None = None  # where the last plan's queries began to see, if not at 0
        self._last: StepPlan | None = None

    def plan(
        self, tree: StepTree, device: torch.device, step_arrays: StepArrays = tuple
    ) -> tuple[StepPlan, list[Tensor]]:
        """The plan for these queries on ``device``, and the tensors of ``step_arrays``: int32 and int64, in one copy.

        Raises:
            ValueError: the queries leave out KV that they need.
        """
        if self.visible.last is not None:
            tree = replace(tree, last=self.visible.last)
        snapshot, queries = tree.snapshot, tree.queries
        key = (snapshot.tree, snapshot.version, queries.node.tobytes(), (queries.end - queries.begin).tobytes(), device)
        if self._last is not None and key == self._key and self._still_fits(tree):
            self._last, tensors = self._renew(self._last, tree, device, step_arrays)
        else:
            self._last, tensors = self._make(tree, device, step_arrays)
            self._key = key
            self._begin = self.visible.begin(tree.positions) if self.visible.limits else None
            self.plans_made += 1
        self._last.visible = self.visible
        self._last.adds |= self.visible.until is not None
        return self._last, tensors

    def formats(self, tree: StepTree) -> tuple[BSR, ...]:
        """The block-sparse rows that plans are made of."""
        tree.check()
        paths = self.by_paths(tree)
        runs = runs_of(tree.snapshot) if paths else None
        visible = self.visible
        return (decompose_unchecked(tree, self.shape, self.cost, visible=visible, paths=paths, runs=runs),)

    def by_paths(self, tree: StepTree) -> bool:
        """Whether plans of this tree take shared nodes of a heavy path as one list: of deep trees.  Of others each
        shared node is a list by itself, whose queries all see it whole, and so need no mask.
        """
        return tree.is_deep

    def _still_fits(self, tree: StepTree) -> bool:
        """Whether the last plan reads all that the queries see now, and little more."""
        if self._begin is None:
            return True
        if tree.positions.min() < max(self.visible.first, self.visible.until or 0):
            return False  # a leaf that grows into sight, or out of it
        moved = self.visible.begin(tree.positions) - self._begin
        return bool(moved.min() >= 0 and moved.max() <= MOST_UNSEEN)

    @abstractmethod
    def specify(self, tree: StepTree) -> Plan:
        """The plan on the host."""

    @abstractmethod
    def _make(self, tree: StepTree, device: torch.device, step_arrays: StepArrays) -> tuple[StepPlan, list[Tensor]]:
        """A new plan, and the tensors of ``step_arrays``."""

    @abstractmethod
    def _renew(
        self, last: StepPlan, tree: StepTree, device: torch.device, step_arrays: StepArrays
    ) -> tuple[StepPlan, list[Tensor]]:
        """The last plan for a tree whose leaves have grown, and the tensors of ``step_arrays``."""
