"""Plans for our kernels: made on the GPU if possible, else in numpy and uploaded in one copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.bsr import BSR, MaskKind, decompose_unchecked
from prefixkit.attention.gpu.capacity import FEWEST_ENTRIES, MOST_PARTIAL_BYTES, PlanCapacity, capacity_for
from prefixkit.attention.gpu.gpu_cost import H200, GpuCost, tiles_only, with_tiles
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan, tile_heads
from prefixkit.attention.gpu.staging import upload
from prefixkit.attention.paths.runs import Runs, with_run_lengths, with_runs
from prefixkit.attention.plan import Plan
from prefixkit.attention.planner import Array, Planner, StepArrays, StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CostModel, HeadShape
from prefixkit.attention.trimmed import unseen_tokens
from prefixkit.attention.visible import ALL, Visible, lowest_positions
from prefixkit.backends.cuda.costs.cost_cache import gpu_cost
from prefixkit.backends.cuda.kernels import kernel_for
from prefixkit.backends.cuda.plan_launch import GraphPlanner, plan_on_gpu, planned_tree
from prefixkit.backends.torch.host_planner import BoundPlan, TorchPlanner
from prefixkit.cuda.jit import arch_of
from prefixkit.ops.arguments import FP8
from prefixkit.threads import once
from prefixkit.tree.arrays import Ints, ranges

log = logging.getLogger("prefixkit")

NO_FLOAT32 = "float32 has no kernel"

# A plan's tensors: the work (``Plan.arrays``), then the tree.  Up to three more may follow, each perhaps without
# elements: the queries' sequence numbers, classes of blocks, and the last positions that queries may see ahead.
WORK_TENSORS, TREE_TENSORS = 7, 5
PLAN_TENSORS = WORK_TENSORS + TREE_TENSORS
# Steps that are planned one by one, by the addresses of their trees.
_steps: WeakValueDictionary[int, StepPlan] = WeakValueDictionary()


class CudaPlanner(Planner):
    """Plans for the CUDA kernels.

    The work's tensors are valid until the tree changes.  Each step uploads the tree's tensors: start, length
    (tokens visible in this step), page_indptr, pages, first_slot.

    Attributes:
        gpu: The costs of the GPU's paths.
        num_sms: Blocks to plan for, one or two per multiprocessor.
        launch: Makes plans on the GPU: from a capacity and the tree (``planned_tree``) the work's tensors.  None: numpy
            makes all plans.  Numpy always makes plans that need too much memory, and plans whose queries do not see all
            keys.
    """

    def __init__(
        self,
        shape: HeadShape,
        gpu: GpuCost,
        num_sms: int,
        launch: Callable[[PlanCapacity, Tensor], list[Tensor]] | None = None,
        visible: Visible = ALL,
    ) -> None:
        super().__init__(shape, gpu.sharing, visible)
        self.gpu, self.num_sms, self.launch = gpu, num_sms, launch
        self._runs: Runs | None = None  # of the last plan

    def specify(self, tree: StepTree) -> Plan:
        return self._plan_of(tree, self.formats(tree))

    def step_plan(self, work: list[Tensor], nodes: list[Tensor], tree: StepTree, *, paths: bool = False) -> StepPlan:
        """The plan that ``work`` holds, or will hold, for these queries over the tree in ``nodes``."""
        return StepPlan([*work, *nodes], tree, *self._on_demand(tree, paths))

    @property
    def trims(self) -> bool:
        """Whether layers read only some keys, so that plans leave out the others."""
        return self.visible.limits

    def unseen(self, tree: StepTree) -> Ints:
        """Tokens at the beginning of each node that no query sees."""
        return unseen_tokens(tree, self.visible)

    def variant(self, tree: StepTree) -> None:
        """One graph serves all trees."""

    def static_plans(self, tree: StepTree, rows: int, nodes: int, device: torch.device) -> None:
        """None: the GPU plans into static buffers."""

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial state."""
        return self.shape.partial_bytes

    def capacity_for(self, tree: StepTree, *, now: bool = False) -> PlanCapacity:
        """Capacity for any plan of this tree, however long its nodes become; ``now``: for their present lengths."""
        paths, now = self._paths_in_graphs and self.by_paths(tree), now and not self.trims
        return capacity_for(tree, self.shape, self.num_sms, self.gpu, now=now, paths=paths)

    def planner(self, nodes: int, capacity: PlanCapacity, device: torch.device, *, now: bool = False) -> GraphPlanner:
        """The planner of a captured graph, for trees of ``nodes`` nodes and plans of this capacity."""
        of = self.shape, nodes, capacity, device, self.gpu, self.num_sms
        return GraphPlanner(*of, paths=self._paths_in_graphs, visible=self.visible, now=now and not self.trims)

    @property
    def _paths_in_graphs(self) -> bool:
        """Not if visible ranges end before the query: then nodes are trimmed at their ends, where paths continue."""
        return self.visible.until is None and self.visible.last is None

    def _make(self, tree: StepTree, device: torch.device, step_arrays: StepArrays) -> tuple[StepPlan, list[Tensor]]:
        tree.check()
        capacity = self._capacity_on_gpu(tree)
        if self.launch is not None and capacity is not None:
            paths = bool(capacity.paths)
            self._runs = tree.runs
            arrays = _tree_arrays(tree, self._runs)
            planned, *tensors = upload([planned_tree(tree, paths=paths), *arrays, *step_arrays()], device)
            made = StepPlan(self.launch(capacity, planned), tree, *self._on_demand(tree, paths))
        else:
            plan = self.specify(tree)
            self._runs, arrays = plan.runs, _tree_arrays(tree, plan.runs)
            tensors = upload([*map(lengthened, plan.arrays()), *arrays, *step_arrays()], device)
            made, tensors = StepPlan(tensors[:WORK_TENSORS], tree, lambda: plan), tensors[WORK_TENSORS:]
        return over_tree(made, tensors[: len(arrays)], tree), tensors[len(arrays) :]

    def _capacity_on_gpu(self, tree: StepTree) -> PlanCapacity | None:
        """Capacity for the plan if the GPU makes it, None if numpy does."""
        if self.launch is None or self.visible.limits:
            return None
        capacity = capacity_for(tree, self.shape, self.num_sms, self.gpu, now=True, paths=self.by_paths(tree))
        if capacity.partials * self.shape.partial_bytes <= MOST_PARTIAL_BYTES:
            return capacity
        log.debug("numpy plans: any plan of these queries needs %d partial rows", capacity.partials)
        return None

    def _renew(
        self, last: StepPlan, tree: StepTree, device: torch.device, step_arrays: StepArrays
    ) -> tuple[StepPlan, list[Tensor]]:
        arrays = _tree_arrays(tree, self._runs)
        tensors = upload([*arrays, *step_arrays()], device)
        return over_tree(last, tensors[: len(arrays)], tree), tensors[len(arrays) :]

    def _on_demand(self, tree: StepTree, paths: bool) -> tuple[Callable[[], Plan], Callable[[Ints], int]]:
        """The GPU's plan on the host, and a function that counts its reads; each is made when it is first needed."""
        runs = tree.runs if paths else None
        tiles = self.visible if paths else ALL
        rows = cache(lambda: decompose_unchecked(tree, self.shape, self.cost, paths=paths, runs=runs, tiles=tiles))
        plan = cache(lambda: self._plan_of(tree, [rows()]))
        of = self.shape, self.num_sms, self.gpu
        cost = cache(lambda: replace(self.cost, tile_heads=tile_heads([rows()], tree.length, *of)))
        return plan, lambda length: count_reads(rows(), length, self.shape, cost())

    def _plan_of(self, tree: StepTree, formats: Sequence[BSR]) -> Plan:
        return make_gpu_plan(formats, tree.length, tree.queries.num_rows, self.shape, self.num_sms, self.gpu)


def _tree_arrays(tree: StepTree, runs: Runs | None) -> list[Array]:
    """The plan's arrays that follow the work."""
    sequences = [] if tree.queries.sequence is None else [tree.sequences]
    if tree.later is None:
        return [*node_arrays(tree, runs), *sequences]
    none = np.zeros(0, np.int64)
    return [*node_arrays(tree, runs), *(sequences or [none]), none, tree.reach]


def node_arrays(tree: StepTree, runs: Runs | None = None) -> list[Ints]:
    """``tree.arrays()`` and a plan's runs, padded with empty nodes to at least two nodes and two pages."""
    start, length, page_indptr, pages, first_slot = with_runs(tree.arrays(), runs)
    indptr = lengthened(page_indptr, FEWEST_ENTRIES + 1, page_indptr[-1])
    return [lengthened(start), lengthened(length), indptr, lengthened(pages), lengthened(first_slot)]


def lengthened(array: Ints, least: int = FEWEST_ENTRIES, value: int = 0) -> Ints:
    """The array, padded with ``value`` to at least ``least`` entries."""
    missing = least - len(array)
    return np.concatenate((array, np.full((missing, *array.shape[1:]), value, array.dtype))) if missing > 0 else array


def over_tree(plan: StepPlan, nodes: list[Tensor], tree: StepTree) -> StepPlan:
    """The plan's work over a tree of these lengths; ``nodes`` hold the tree for this step only."""
    step = replace(plan, tensors=[*plan.tensors[:WORK_TENSORS], *nodes], tree=tree, owners=None)
    _steps[nodes[0].data_ptr()] = step
    return step


def plan_in_torch(plan: Sequence[Tensor]) -> BoundPlan | None:
    """A step's plan for plain torch, made for the first layer that needs it; None for a plan in a graph's tensors."""
    step = _steps.get(plan[WORK_TENSORS].data_ptr())
    if step is not None and step.owners is None:
        step.owners = BoundPlan(step.plan, step.tree)
    return None if step is None else cast(BoundPlan, step.owners)


@once
def say_plain_torch(why: str) -> None:
    """Log once why our kernels do not compute attention."""
    log.warning("tree_attention runs in plain torch: %s", why)


def count_reads(rows: BSR, length: Ints, shape: HeadShape, cost: CostModel) -> int:
    """The number of tokens' KV that a run of a plan of these rows reads, over all heads.

    Each tile reads all tokens of its row; in a row of kind LIMIT those from the first that one of its queries sees to
    the last query's limit.
    """
    length = with_run_lengths(length, rows.runs)
    tokens = np.add.reduceat(np.minimum(rows.end, length[rows.node]) - rows.begin, rows.indptr[:-1], dtype=np.int64)
    queries, many = rows.q_end - rows.q_begin, max(1, cost.tile_heads // shape.gqa_group)
    tiles = np.where(queries * shape.gqa_group <= cost.decode_heads, 1, -(-queries // many))
    limited = np.flatnonzero(rows.kind == MaskKind.LIMIT)
    count = queries[limited]
    first, row = np.cumsum(count) - count, np.repeat(np.arange(len(limited)), tiles[limited])
    last = np.minimum(ranges(np.ones_like(limited), tiles[limited]) * many, count[row]) - 1
    unread = rows.last[limited][row] - rows.limit[first[row] + last]
    if len(rows.seen_from):
        begin = first[row] + ranges(np.zeros_like(limited), tiles[limited]) * many
        lowest = lowest_positions(rows.seen_from, begin, first[row] + last + 1)
        whole = tokens[limited][row]
        skipped = np.clip(whole - (rows.last[limited][row] + 1 - lowest), 0, whole)
        unread = np.minimum(unread + skipped, whole)
    if len(rows.skip):
        tokens = tokens - rows.skip
    return int((tiles * tokens).sum()) - int(unread.sum())


def planner_for(shape: HeadShape, device: torch.device, dtype: torch.dtype, visible: Visible = ALL) -> Planner:
    """The planner for a GPU: for our kernels, or for plain torch if no kernel supports the dtype or the heads.

    ``dtype`` is that of queries and of pages, except that pages with elements of one byte hold e4m3.
    """
    arch = arch_of(device)
    kernel = kernel_for(arch, shape.head_dim, shape.gqa_group, shape.value_dim, e4m3=shape.itemsize == FP8.itemsize)
    if kernel is None or dtype not in (torch.bfloat16, torch.float16):
        size = str(shape.head_dim) if shape.value_dim == shape.head_dim else f"{shape.head_dim} and {shape.value_dim}"
        say_plain_torch(NO_FLOAT32 if kernel else f"head size {size} has no kernel")
        return TorchPlanner(shape, H200.sharing, visible)
    gpu = gpu_cost(device) if kernel.uses_tma else H200  # costs are measured with the Hopper kernel, if it runs
    gpu = with_tiles(gpu, kernel.tile_rows, kernel.decode_rows, kernel.decode_kv_tile, kernel.low_tile_rows)
    if shape.value_dim != shape.head_dim:
        gpu = tiles_only(gpu)
    blocks = kernel.blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
    if shape.gqa_group > kernel.tile_rows:
        log.debug("numpy plans: the GPU's planner knows no GQA groups above a tile's %d rows", kernel.tile_rows)
        return CudaPlanner(shape, gpu, blocks, visible=visible)

    def launch(capacity: PlanCapacity, tree: Tensor) -> list[Tensor]:
        return plan_on_gpu(shape, gpu, blocks, capacity, tree)

    return CudaPlanner(shape, gpu, blocks, launch, visible)
