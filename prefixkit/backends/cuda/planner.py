"""Plans for our kernels: made by the GPU where it can, else in numpy, and brought there in one copy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.ancestry import Longs, mark
from prefixkit.attention.bsr import Queries, check_queries, visible_lengths
from prefixkit.attention.capacity import MOST_PARTIAL_BYTES, PlanCapacity, capacity_for, room_for
from prefixkit.attention.gpu_cost import H200, NARROW_ROWS, GpuCost
from prefixkit.attention.plan import Plan, make_plan
from prefixkit.attention.planner import Array, Beside, Planner, StepPlan
from prefixkit.attention.sharing import CostModel, HeadShape, decide_sharing
from prefixkit.attention.staging import upload
from prefixkit.backends.cuda.cost_cache import gpu_cost
from prefixkit.backends.cuda.plan_launch import GraphPlanner, plan_on_gpu
from prefixkit.backends.cuda.units import kernel_for
from prefixkit.backends.torch.planner import BoundPlan, TorchPlanner
from prefixkit.cuda.nvrtc import arch_for, supported_archs
from prefixkit.tree.snapshot import Ints, TreeSnapshot

log = logging.getLogger("prefixkit")

# A plan's tensors: those of the work (``Plan.arrays``), then the tree's, then a handle for variants without a CUDA body.
WORK_TENSORS, TREE_TENSORS = 6, 5


class CudaPlanner(Planner):
    """Plans for the CUDA kernels.

    The work's tensors stay while the tree does; each step brings the tree's: start, length (tokens visible in this step),
    page_indptr, pages, first_slot.

    Attributes:
        gpu: What the paths of the GPU cost.
        num_sms: Blocks to plan for, one or two per multiprocessor.
        launch: Makes plans on the GPU, from a capacity and the tree to the work's tensors; None plans in numpy.  Numpy makes
            those that need too much memory in any case.
    """

    def __init__(
        self,
        shape: HeadShape,
        gpu: GpuCost,
        num_sms: int,
        launch: Callable[[PlanCapacity, Tensor], list[Tensor]] | None = None,
    ) -> None:
        super().__init__(shape, gpu.sharing)
        self.gpu, self.num_sms, self.launch = gpu, num_sms, launch

    def specify(self, snapshot: TreeSnapshot, queries: Queries) -> Plan:
        return make_plan(
            self.formats(snapshot, queries),
            visible_lengths(snapshot, queries),
            queries.num_rows,
            group=self.shape.group,
            kv_heads=self.shape.kv_heads,
            num_sms=self.num_sms,
            cost=self.gpu,
        )

    def step_plan(self, work: list[Tensor], nodes: list[Tensor], snapshot: TreeSnapshot, queries: Queries) -> StepPlan:
        """The plan of these queries that ``work`` holds, or will hold, over a tree in ``nodes``."""
        return StepPlan([*work, *nodes], snapshot, queries, *self._on_demand(snapshot, queries))

    def capacity_for(self, snapshot: TreeSnapshot, queries: Queries) -> PlanCapacity:
        """Capacity for any plan of this tree, however long its nodes become."""
        return capacity_for(snapshot, queries, self.shape, self.num_sms, self.gpu)

    def planner(self, nodes: int, capacity: PlanCapacity, device: torch.device) -> GraphPlanner:
        """What plans in a captured graph, for trees of so many nodes and plans of this capacity."""
        return GraphPlanner(self.shape, nodes, capacity, device, self.gpu, self.num_sms)

    def _make(
        self, snapshot: TreeSnapshot, queries: Queries, device: torch.device, beside: Beside
    ) -> tuple[StepPlan, list[Tensor]]:
        check_queries(snapshot, queries)
        tree = tree_arrays(snapshot, queries)
        room = room_for(snapshot, queries, self.shape, self.num_sms, self.gpu)
        if self.launch is not None and room.partials * self.shape.partial_bytes <= MOST_PARTIAL_BYTES:
            own = queries.rows_per_node(snapshot.num_nodes)
            nodes = np.concatenate((snapshot.parent, snapshot.subtree_end, tree[1], own, [snapshot.num_nodes]))
            there, *tensors = upload([nodes.astype(np.int32), *tree, *beside()], device)
            made = StepPlan(self.launch(room, there), snapshot, queries, *self._on_demand(snapshot, queries))
        else:
            if self.launch is not None:
                log.debug("numpy plans: room for any plan of these queries is room for %d partial rows", room.partials)
            plan = self.specify(snapshot, queries)
            tensors = upload([*plan.arrays(), *tree, *beside()], device)
            work, tensors = tensors[:WORK_TENSORS], tensors[WORK_TENSORS:]
            made = StepPlan(work, snapshot, queries, lambda: plan)
        return _bound(made, tensors[:TREE_TENSORS], snapshot, queries), tensors[TREE_TENSORS:]

    def _renew(
        self, last: StepPlan, snapshot: TreeSnapshot, queries: Queries, device: torch.device, beside: Beside
    ) -> tuple[StepPlan, list[Tensor]]:
        tensors = upload([*tree_arrays(snapshot, queries), *beside()], device)
        return _bound(last, tensors[:TREE_TENSORS], snapshot, queries), tensors[TREE_TENSORS:]

    def _on_demand(self, snapshot: TreeSnapshot, queries: Queries) -> tuple[Callable[[], Plan], Callable[[Ints], int]]:
        """The plan on the host and a count of what it reads, each made once, when it is first asked for."""
        reads = cache(lambda: Reads.of(snapshot, queries, self.shape, self.cost))
        return cache(lambda: self.specify(snapshot, queries)), lambda length: reads().count(length)


def _bound(plan: StepPlan, nodes: list[Tensor], snapshot: TreeSnapshot, queries: Queries) -> StepPlan:
    """The plan's work over a tree of these lengths, with a handle for plain torch."""
    bound = BoundPlan(plan.specify, snapshot, queries)
    tensors = [*plan.tensors[:WORK_TENSORS], *nodes, bound.handle]
    return replace(plan, tensors=tensors, holds=bound)


def tree_arrays(snapshot: TreeSnapshot, queries: Queries) -> tuple[Array, ...]:
    """The tree as int32 arrays, in the order in which kernels take it."""
    length = visible_lengths(snapshot, queries)
    return snapshot.start, length, snapshot.page_indptr, snapshot.pages, snapshot.first_slot


@dataclass(frozen=True, eq=False)
class Reads:
    """What a GPU's plan reads, known without the plan: each tile of a row reads all tokens of the row.

    A row reads its path down to its own node, from where the nearest shared node above it ends.

    Attributes:
        start: ``[nodes]`` the position of each node's first token.
        node: ``[rows]`` the node of each row, dense or causal.
        begin: ``[rows]`` the position from which it reads.
        tiles: ``[rows]`` how many tiles do.
    """

    start: Ints
    node: Longs
    begin: Longs
    tiles: Longs

    @staticmethod
    def of(snapshot: TreeSnapshot, queries: Queries, shape: HeadShape, cost: CostModel) -> Reads:
        """The reads of plans for kernels of this cost."""
        own = queries.rows_per_node(snapshot.num_nodes)
        row_of_node = np.concatenate(([0], np.cumsum(own)))
        below = row_of_node[snapshot.subtree_end] - row_of_node[1:]
        shared = decide_sharing(snapshot, own, below, shape, cost)
        dense, causal = np.flatnonzero(shared), np.flatnonzero(own)
        node = np.concatenate((dense, causal))
        # A node's own queries and its dense row read the same path.
        nearest = mark(snapshot.subtree_end, shared).nearest(node)
        ends = np.concatenate((snapshot.start + snapshot.length, [0])).astype(np.int64)
        rows = np.concatenate((below[dense], own[causal]))
        full = -(-rows // max(1, cost.tile_heads // shape.group))
        return Reads(snapshot.start, node, ends[nearest], np.where(rows * shape.group <= NARROW_ROWS, 1, full))

    def count(self, length: Ints) -> int:
        """Token KVs read in a run over all heads, when node ``n`` holds ``length[n]`` tokens."""
        end = self.start[self.node].astype(np.int64) + length[self.node]
        return int((self.tiles * (end - self.begin)).sum())


def planner_for(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> Planner:
    """The planner for a GPU: of our kernels, or of plain torch where no kernel serves the dtype or the heads."""
    kernel = None
    if dtype != torch.float32:
        arch = arch_for(torch.cuda.get_device_capability(device), supported_archs())
        kernel = kernel_for(arch, shape.head_dim, shape.group)
    if kernel is None:
        return TorchPlanner(shape, H200.sharing)
    gpu = gpu_cost(device) if kernel.by_maps else H200  # measured with Hopper's kernel where that is the one
    gpu = replace(gpu, sharing=replace(gpu.sharing, tile_heads=kernel.wide_rows))
    blocks = kernel.blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
    if shape.group > kernel.wide_rows:
        log.debug("numpy plans: the GPU's planner knows no groups above a tile's %d rows", kernel.wide_rows)
        return CudaPlanner(shape, gpu, blocks)
    return CudaPlanner(shape, gpu, blocks, lambda capacity, tree: plan_on_gpu(shape, gpu, blocks, capacity, tree))


def graph_planning(planner: Planner) -> CudaPlanner | None:
    """The planner, if the GPU makes its plans: then a captured graph can."""
    return planner if isinstance(planner, CudaPlanner) and planner.launch is not None else None
