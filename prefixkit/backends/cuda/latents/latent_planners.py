"""Plans of the two parts of attention over latents, for our kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.bsr import BSR, decompose
from prefixkit.attention.gpu.capacity import PlanCapacity, capacity_for
from prefixkit.attention.gpu.gpu_cost import H200_LATENT, GpuCost, tiles_only
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.gpu.latent_cost import (
    H200_LATENTS,
    Expanded,
    LatentCost,
    choose_expanded,
    expands_own,
    made_bytes,
)
from prefixkit.attention.gpu.staging import upload
from prefixkit.attention.latent_parts import LatentPart, Part, PartRows
from prefixkit.attention.plan import Plan
from prefixkit.attention.planner import Array, Planner, StepArrays, StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.backends.cuda.costs.cost_cache import gpu_cost
from prefixkit.backends.cuda.device_planner import (
    NO_FLOAT32,
    TREE_TENSORS,
    WORK_TENSORS,
    CudaPlanner,
    count_reads,
    lengthened,
    node_arrays,
    say_plain_torch,
)
from prefixkit.backends.cuda.kernels import expanded_kernel_for, latent_groups, latent_kernel_for
from prefixkit.backends.cuda.latents.expansion import Expansion, expanded_tokens
from prefixkit.backends.cuda.latents.static_expanded import StaticExpanded
from prefixkit.backends.cuda.plan_launch import GraphPlanner
from prefixkit.backends.torch import latent_attention
from prefixkit.cuda.jit import arch_of
from prefixkit.tree.arrays import Ints

# The share of a GPU's memory that expanded K and V, kept from step to step, may take in all layers together.
KEPT_SHARE = 1 / 8


class LatentPlanner(Planner):
    """Plans one part.

    The plan's tensors are the work and the tree, as ``tree_attention`` takes them; then ``[rows]`` int32 with the
    part's row for each query row of the step, or -1.  In the expanded part's plan ``StepPlan.owners`` is its
    :class:`Expansion`.

    Args:
        part: Which of the two parts.
        shape: The part's heads, as its kernel takes them.
        gpu: The costs of its kernel.
        num_sms: Blocks to plan for.
        most_kept: The most tokens of which K and V may be kept.
        latents: The costs of the parts.
    """

    def __init__(
        self, part: LatentPart, shape: HeadShape, gpu: GpuCost, num_sms: int, most_kept: int, latents: LatentCost
    ) -> None:
        super().__init__(shape, gpu.sharing)
        self.part, self.gpu, self.num_sms, self.most_kept, self.latents = part, gpu, num_sms, most_kept, latents
        self._rows: PartRows | None = None  # of the last plan
        self._expansion: Expansion | None = None
        self._chosen: tuple[StepTree, Expanded] | None = None  # of the last tree

    def chosen(self, tree: StepTree) -> Expanded:
        """The nodes to expand; both parts make the same choice."""
        if self._chosen is None or self._chosen[0] is not tree:
            self._chosen = tree, choose_expanded(tree, self.part, self.latents, self.most_kept)
        return self._chosen[1]

    def rows_of(self, tree: StepTree, expanded: Expanded) -> PartRows:
        """The part's BSR rows; its shared nodes are the expanded nodes."""
        bsr = decompose(tree, self.part.whole, self.cost, expanded.nodes)
        made = ~bsr.causal | expands_own(bsr, tree, self.part, self.latents)
        return PartRows.of(bsr, made == (self.part.part is Part.EXPANDED), tree)

    def formats(self, tree: StepTree) -> tuple[BSR, ...]:
        return (self.rows_of(tree, self.chosen(tree)).bsr,)

    def specify(self, tree: StepTree) -> Plan:
        return self.plan_of(tree, self.rows_of(tree, self.chosen(tree)))

    def plan_of(self, tree: StepTree, rows: PartRows) -> Plan:
        """The plan of some rows."""
        return make_gpu_plan((rows.bsr,), tree.length, len(rows.index), self.shape, self.num_sms, self.gpu)

    # -- decode steps in CUDA graphs -----------------------------------------------------------------------------------

    trims = True

    def unseen(self, tree: StepTree) -> Ints:
        """All tokens of expanded nodes, because the absorbed part does not read them."""
        unseen: Ints = np.where(self.chosen(tree).nodes, tree.length, 0).astype(np.int32)
        return unseen

    def variant(self, tree: StepTree) -> str:
        """Whether nodes are expanded, and whether their K and V are kept."""
        chosen = self.chosen(tree)
        if self.part.part is Part.ABSORBED or not chosen.nodes.any():
            return ""
        return "kept" if chosen.keeps else "made"

    def static_plans(self, tree: StepTree, rows: int, nodes: int, device: torch.device) -> StaticExpanded | None:
        """For the expanded part, whose plan stays the same as leaves grow; the GPU plans the absorbed part."""
        if self.part.part is Part.ABSORBED:
            return None
        return StaticExpanded(self, tree, rows, nodes, device)

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial state."""
        return self.shape.partial_bytes

    def capacity_for(self, tree: StepTree, *, now: bool = False) -> PlanCapacity:
        """Capacity for any plan of the absorbed part of this tree, whose nodes are trimmed."""
        return capacity_for(tree, self.shape, self.num_sms, self.gpu)

    def planner(self, nodes: int, capacity: PlanCapacity, device: torch.device, *, now: bool = False) -> GraphPlanner:
        """The planner of a captured graph, for trees of ``nodes`` nodes and plans of this capacity."""
        return GraphPlanner(self.shape, nodes, capacity, device, self.gpu, self.num_sms)

    def step_plan(self, work: list[Tensor], nodes: list[Tensor], tree: StepTree, *, paths: bool = False) -> StepPlan:
        """The plan of the absorbed part that ``work`` holds, or will hold, over a tree in ``nodes``; never by paths."""
        rows = cache(lambda: decompose(tree, self.shape, self.cost))
        place = torch.arange(work[4].shape[0], dtype=torch.int32, device=work[0].device)
        return StepPlan(
            [*work, *nodes, place],
            tree,
            lambda: make_gpu_plan([rows()], tree.length, tree.queries.num_rows, self.shape, self.num_sms, self.gpu),
            count_reads=lambda length: count_reads(rows(), length, self.shape, self.cost),
            adds=True,
        )

    # -- eager steps ---------------------------------------------------------------------------------------------------

    def _make(self, tree: StepTree, device: torch.device, step_arrays: StepArrays) -> tuple[StepPlan, list[Tensor]]:
        tree.check()
        chosen = self.chosen(tree)
        rows = self._rows = self.rows_of(tree, chosen)
        plan, nodes = self.plan_of(tree, rows), node_arrays(rows.tree(tree))
        place = np.full(tree.queries.num_rows, -1, np.int32)
        place[rows.index] = np.arange(len(rows.index))
        work = [lengthened(array) for array in plan.arrays()]
        made = expanded_tokens(tree, rows.bsr) if self.part.part is Part.EXPANDED else None
        arrays: list[Array] = [*work, *(nodes if made is None else made.nodes), place, rows.index]
        if made is not None:
            arrays.append(made.slots)
        tensors = upload([*arrays, *step_arrays()], device)
        step, (index, *others) = tensors[: WORK_TENSORS + TREE_TENSORS + 1], tensors[WORK_TENSORS + TREE_TENSORS + 1 :]
        if made is not None:
            slots, *others = others
            key = made.key if chosen.keeps else None
            if key is None or self._expansion is None or self._expansion.key != key:
                self._expansion = Expansion(self.part, slots, key)
            self._expansion.slots = slots
        whole = len(rows.index) == tree.queries.num_rows
        made_plan = StepPlan(
            step,
            tree,
            lambda: plan,
            owners=self._expansion,
            rows=None if whole else index,
            adds=self.part.part is Part.ABSORBED,
        )
        return made_plan, others

    def _renew(
        self, last: StepPlan, tree: StepTree, device: torch.device, step_arrays: StepArrays
    ) -> tuple[StepPlan, list[Tensor]]:
        """In decode steps the expanded nodes do not grow, so the plan stays; other steps are planned anew."""
        if self.part.part is Part.EXPANDED:
            if bool((tree.own_rows > 1).any()):
                return self._make(tree, device, step_arrays)
            return replace(last, tree=tree), upload(step_arrays(), device)
        assert self._rows is not None, "made with the last plan"
        nodes = node_arrays(self._rows.tree(tree))
        tensors = upload([*nodes, *step_arrays()], device)
        work, place = last.tensors[:WORK_TENSORS], last.tensors[-1]
        return replace(last, tensors=[*work, *tensors[:TREE_TENSORS], place], tree=tree), tensors[TREE_TENSORS:]


def planner_for(
    part: LatentPart, device: torch.device, dtype: torch.dtype, layers: int, latents: LatentCost = H200_LATENTS
) -> LatentPlanner | latent_attention.LatentPlanner:
    """The planner of a part: for our kernels if they support both parts, else for plain torch."""
    arch = arch_of(device)
    whole, latent, rotary = part.whole, part.latent, part.rotary
    groups, kernel = latent_groups(whole.heads), latent_kernel_for(arch, latent, rotary)
    over_made = expanded_kernel_for(arch, whole.head_dim - rotary, rotary, whole.value_dim)
    if kernel is None or groups is None or over_made is None or dtype == torch.float32 or not is_plain(whole):
        sizes = f"{latent} + {rotary} for {whole.heads} heads of {whole.head_dim} and {whole.value_dim}"
        say_plain_torch(NO_FLOAT32 if dtype == torch.float32 else f"latents of {sizes} have no kernels")
        return latent_attention.planner_for(part, device, dtype, layers)
    properties = torch.cuda.get_device_properties(device)
    most_kept = int(properties.total_memory * KEPT_SHARE) // (made_bytes(part) * layers)
    if part.part is Part.ABSORBED:
        shape, gpu = HeadShape(whole.heads, groups, latent + rotary, dtype.itemsize, latent), H200_LATENT
    else:
        cost = gpu_cost(device)
        shape = whole
        gpu = tiles_only(replace(cost, sharing=replace(cost.sharing, tile_heads=over_made.tile_rows)))
    return LatentPlanner(part, shape, gpu, properties.multi_processor_count, most_kept, latents)


def is_plain(whole: HeadShape) -> bool:
    """Whether each query head has its own K and V."""
    return whole.kv_heads == whole.heads


def graph_planning(planner: Planner) -> CudaPlanner | LatentPlanner | None:
    """The planner, if captured graphs can make its plans, or read them."""
    if isinstance(planner, LatentPlanner):
        return planner
    return planner if isinstance(planner, CudaPlanner) and planner.launch is not None else None
