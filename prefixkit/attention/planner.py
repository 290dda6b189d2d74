"""Planning: make the attention op's plan from a step's tree and queries; a plan is reused while they stay the same."""

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
# As leaves grow, tokens that a plan reads leave the visible range: at most this many per query, one KV tile.
MOST_UNSEEN = 64


@dataclass(eq=False)
class StepPlan:
    """The plan of one step: opaque tensors for the attention op, and facts of the plan on the host.

    Attributes:
        tensors: What ``tree_attention`` takes as ``plan``; only the backend that made them reads them.
        tree: The tree that the plan was made for.
        specify: Makes the plan on the host; called when that is first needed, and cheap when called again.
        count_reads: Counts the token KVs that the plan reads, for all heads, when node ``n`` has ``length[n]`` tokens;
            None: they are counted from the host's plan.
        owners: Objects that must live for as long as the tensors are used.
        visible: Which tokens queries see.
        rows: ``[rows]`` int64 on the device: the step's query rows that the plan computes, maybe none; None: all.
        adds: Whether the plan's reads add to those of another plan for the same layers.
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
        """Token KVs that attention reads in one layer over a tree of this structure, and would read unshared.  The
        second number is 0 for a plan that ``adds`` to another over the same tokens.
        """
        if self.adds and self.visible.until is None:
            return self.kv_tokens_read(tree.length), 0
        return self.kv_tokens_read(tree.length), int(self.visible.count(tree.positions).sum())

    def kv_tokens_read(self, length: Ints) -> int:
        """Token KVs that attention reads in one layer, when node ``n`` has ``length[n]`` tokens."""
        return self.plan.kv_tokens_read(length) if self.count_reads is None else self.count_reads(length)


class Planner(ABC):
    """Plans steps for one head shape, and reuses the last plan while the tree and the query counts stay the same.

    A backend subclasses it: :meth:`specify` makes the plan on the host, :meth:`_make` uploads one, and :meth:`_renew`
    adapts the last one to a step of the same tree.

    Attributes:
        shape: The attention heads.
        cost: The cost model that decides what is shared.
        visible: The range that queries see; nothing before it is read.
        plans_made: How many plans were made, for tests and reports.
    """

    def __init__(self, shape: HeadShape, cost: CostModel, visible: Visible = ALL) -> None:
        self.shape, self.cost, self.visible = shape, cost, visible
        self.plans_made = 0
        self._key: tuple[object, ...] | None = None
        self._begin: NDArray[np.int64] | None = None  # first visible positions of the last plan, if not 0
        self._last: StepPlan | None = None

    def plan(
        self, tree: StepTree, device: torch.device, step_arrays: StepArrays = tuple
    ) -> tuple[StepPlan, list[Tensor]]:
        """The plan for these queries on ``device``, and the int32 and int64 tensors of ``step_arrays``, in one copy.

        Raises:
            ValueError: the queries do not compute KV that they need.
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
        """Whether plans of this tree read shared nodes of a heavy path as one list, as those of deep trees do.  Else
        each shared node is a list by itself, which needs no mask, as all its queries see all of it.
        """
        return tree.is_deep

    def _still_fits(self, tree: StepTree) -> bool:
        """Whether the last plan reads all tokens that the queries see now, and few others."""
        if self._begin is None:
            return True
        if tree.positions.min() < max(self.visible.first, self.visible.until or 0):
            return False  # a leaf grows into the visible range, or out of it
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
