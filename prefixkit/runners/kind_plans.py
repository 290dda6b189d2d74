"""A kind of layers' plans of captured decode steps: over nodes that begin where some query sees them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prefixkit.attention.gpu.staging import Staged
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.trimmed import trimmed
from prefixkit.attention.visible import Visible
from prefixkit.ops.backend import GraphPlanner, GraphPlanning
from prefixkit.runners.decode_tree import DecodeTree


class KindPlans:
    """The plans of one kind of layers, over the static buffers of a :class:`DecodeTree`.

    Where queries see all tokens, the plan is over the tree's own nodes.  Else each node begins at its first token that
    a query sees, as of the last upload, and kernels mask what falls out of sight until the next.

    Args:
        planner: Makes the plans on the device.
        planning: What made it.
        visible: What queries of these layers see.
        tree: The tree.
    """

    def __init__(self, planner: GraphPlanner, planning: GraphPlanning, visible: Visible, tree: DecodeTree) -> None:
        self.planner, self._planning, self._visible, self._tree = planner, planning, visible, tree
        self.nodes = tree.nodes
        self._staged: Staged | None = None
        if planning.trims:
            start, length, page_indptr, pages, first_slot = tree.nodes
            self._staged = Staged([tuple(start.shape)], start.device)
            own = (torch.zeros_like(one) for one in (start, length, first_slot))
            self._own_start, self._own_length, self._own_first_slot = own
            self.nodes = [self._own_start, self._own_length, page_indptr, pages, self._own_first_slot]

    def holds(self, tree: StepTree) -> bool:
        """Whether any plan of a tree fits."""
        return self.planner.capacity.holds(self._planning.capacity_for(tree))

    def plan_of(self, tree: StepTree) -> StepPlan:
        """The plan of a tree that is uploaded, or will be."""
        if self._staged is None:
            return self._planning.step_plan(self.planner.work, self.nodes, tree)
        unseen = self._planning.unseen(tree)
        plan = self._planning.step_plan(self.planner.work, self.nodes, trimmed(tree, unseen))
        count = plan.kv_tokens_read
        return replace(plan, count_reads=lambda length: count(length - unseen), visible=self._visible)

    def stage(self, tree: StepTree) -> None:
        """The host's part of :meth:`upload`."""
        if self._staged is not None:
            unseen = self._planning.unseen(tree)
            self._staged.writable()[0][: len(unseen)] = unseen
            tree = trimmed(tree, unseen)
        self.planner.stage(tree)

    def upload(self, tree: StepTree) -> None:
        """Upload a tree and plan it, on the current stream; its nodes are in the :class:`DecodeTree` by then."""
        if self._staged is not None:
            unseen = self._planning.unseen(tree)
            self._staged.writable()[0][: len(unseen)] = unseen
            self._staged.upload()
            self._trim()
            tree = trimmed(tree, unseen)
        self.planner.upload(tree)
        self.planner.plan()

    def enqueue_copy(self) -> None:
        """Copy what :meth:`stage` wrote last to the device, and plan it.  Can be captured."""
        if self._staged is not None:
            self._staged.enqueue_copy()
            self._trim()
        self.planner.enqueue_copy()
        self.planner.plan()

    def replan(self, tree: StepTree) -> None:
        """Plan again for a tree whose leaves have grown to these lengths."""
        if self._staged is not None:
            return self.upload(tree)
        length: Tensor = self._tree.nodes[1]
        self.planner.length[: self.planner.nodes].copy_(length[: self.planner.nodes])
        self.planner.plan()

    def advance(self) -> None:
        """Follow a step of the tree, whose leaves have grown by a token.  Can be captured."""
        if self._staged is not None:
            torch.sub(self._tree.nodes[1], self._staged.tensors[0], out=self._own_length)

    def clear(self) -> None:
        """No work."""
        self.planner.work[0].zero_()

    def _trim(self) -> None:
        assert self._staged is not None, "of a kind that sees less than all"
        start, length, _, _, first_slot = self._tree.nodes
        (unseen,) = self._staged.tensors
        torch.add(start, unseen, out=self._own_start)
        torch.add(first_slot, unseen, out=self._own_first_slot)
        torch.sub(length, unseen, out=self._own_length)
