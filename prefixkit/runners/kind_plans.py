"""Plans of captured steps for one kind of layers, over nodes trimmed to the tokens that some query sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.gpu.capacity import MOST_PARTIAL_BYTES, PlanCapacity
from prefixkit.attention.gpu.staging import Staged
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.trimmed import trimmed
from prefixkit.attention.visible import Visible
from prefixkit.ops.backend import GraphPlanner, GraphPlanning
from prefixkit.runners.decode_tree import StagedTree
from prefixkit.tree.arrays import Ints


class KindPlans:
    """The plans of one kind of layers, over the static buffers of a :class:`StagedTree`.

    If queries see all tokens, the plan is over the tree's own nodes.  Otherwise the plan trims each node to the tokens
    from the first to the last that some query sees, as of the last upload; until the next upload kernels mask the
    tokens that become invisible.

    Args:
        planner: Makes the plans on the device.
        planning: The planning that made the planner.
        visible: The tokens that queries of these layers see.
        tree: The tree.
    """

    def __init__(self, planner: GraphPlanner, planning: GraphPlanning, visible: Visible, tree: StagedTree) -> None:
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
        """Whether any plan of the tree fits."""
        return self.planner.holds(tree)

    def plan_of(self, tree: StepTree) -> StepPlan:
        """The plan of a tree that is or will be uploaded."""
        if self._staged is None:
            paths = self.planner.by_paths(tree)
            return self._planning.step_plan(self.planner.work, self.nodes, tree, paths=paths)
        unseen = self._unseen(tree)
        cut, until = self._cut(tree, unseen), self._visible.until
        plan = self._planning.step_plan(self.planner.work, self.nodes, cut, paths=self.planner.by_paths(tree))
        count, most = plan.kv_tokens_read, None if until is None else np.maximum(until - tree.snapshot.start, 0)

        def count_reads(length: Ints) -> int:
            return count(np.clip(length - unseen, 0, most))

        return replace(plan, count_reads=count_reads, visible=self._visible, adds=until is not None)

    def stage(self, tree: StepTree) -> None:
        """The host's part of :meth:`upload`."""
        if self._staged is not None:
            unseen = self._unseen(tree)
            self._staged.writable()[0][: len(unseen)] = unseen
            tree = self._cut(tree, unseen)
        self.planner.stage(tree)

    def upload(self, tree: StepTree) -> None:
        """Upload a tree and plan it, on the current stream; the :class:`StagedTree` must hold its nodes already.

        Raises:
            ValueError: the queries leave out KV that they need.
        """
        tree.check()
        if self._staged is not None:
            unseen = self._unseen(tree)
            self._staged.writable()[0][: len(unseen)] = unseen
            self._staged.upload()
            self._trim()
            tree = self._cut(tree, unseen)
        self.planner.upload(tree)
        self.planner.plan()

    def enqueue_copy(self) -> None:
        """Copy the tree that :meth:`stage` wrote last to the device, and plan it.  Can be captured."""
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
        """Lengthen the leaves by a token, as a step of the tree has done.  Can be captured."""
        if self._staged is not None:
            start, length, *_ = self._tree.nodes
            torch.sub(length, self._staged.tensors[0], out=self._own_length)
            if self._visible.first:  # a leaf may be shorter than its trimmed part
                self._own_length.clamp_(min=0)
            if self._visible.until is not None:
                most = (self._visible.until - start).clamp_(min=0)
                torch.minimum(self._own_length, most, out=self._own_length)

    def clear(self) -> None:
        """Empty the plan: the next step does no work."""
        self.planner.work[0].zero_()

    def _trim(self) -> None:
        assert self._staged is not None, "of a kind that sees less than all"
        start, _, _, _, first_slot = self._tree.nodes
        (unseen,) = self._staged.tensors
        torch.add(start, unseen, out=self._own_start)
        torch.add(first_slot, unseen, out=self._own_first_slot)
        self.advance()

    def _unseen(self, tree: StepTree) -> Ints:
        """Tokens at the beginning of each node that no query sees.  If the planner plans by paths, they are 0 for inner
        nodes: these are slices of runs, and tiles begin at the first token that their queries see.
        """
        unseen = self._planning.unseen(tree)
        if self.planner.by_paths(tree):
            unseen[tree.below > 0] = 0
        return unseen

    def _cut(self, tree: StepTree, unseen: Ints) -> StepTree:
        return trimmed(tree, unseen, self._visible.until)


def kind_plans(
    planning: GraphPlanning,
    tree: StepTree,
    rows: int,
    buffers: StagedTree,
    least: PlanCapacity | None = None,
    *,
    now: bool = False,
) -> KindPlans:
    """Plans of up to ``rows`` query rows over ``buffers``, for trees somewhat larger than ``tree``.

    Args:
        planning, tree, rows, buffers: As above.
        least: A capacity that the plans have at least.
        now: Trees do not grow while their plans are in use.

    Raises:
        OutOfMemoryError: ``now``, and partial states would take more memory than is left for those of a graph.
    """
    most = with_slack(planning.capacity_for(tree, now=now), rows)
    if now and (need := most.partials * planning.partial_bytes) > MOST_PARTIAL_BYTES:
        raise torch.OutOfMemoryError(f"partial states of attention may take {need / 2**20:.0f} MiB")
    if least is not None:
        most = PlanCapacity(*map(max, most, least))
    planner = planning.planner(buffers.capacity.nodes, most, buffers.nodes[0].device, now=now)
    return KindPlans(planner, planning, planning.visible, buffers)


def more_than(size: int) -> int:
    """A size for buffers that are to hold somewhat more than ``size``."""
    return size + size // 4 + 64


def with_slack(need: PlanCapacity, rows: int) -> PlanCapacity:
    """A larger capacity, which also holds the plans of other trees."""
    sizes = (need.tile_items, need.decode_items, need.segments, need.partials)
    tile_items, decode_items, segments, partials = (more_than(size * rows // max(1, need.rows)) for size in sizes)
    return PlanCapacity(tile_items, decode_items, segments, rows, partials, need.paths)
