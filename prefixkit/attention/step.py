"""One forward pass: which tokens run, where their KV goes, and how they attend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.bsr import BSR, Queries, check_queries, decompose, visible_lengths
from prefixkit.attention.capacity import PlanCapacity, room_for
from prefixkit.attention.gpu_cost import H200, GpuCost
from prefixkit.attention.gpu_plan import GpuPlan, make_gpu_plan
from prefixkit.attention.plan import Plan, make_plan
from prefixkit.attention.planned import Planned, Reads
from prefixkit.attention.sharing import CPU_COST, CostModel, HeadShape
from prefixkit.attention.staging import upload
from prefixkit.tree.snapshot import Ints, TreeSnapshot

log = logging.getLogger("prefixkit")

Array = NDArray[np.signedinteger]

# The GPU's planner must have room for any plan, of which the attention op keeps room for partial states: no more than this.
MOST_PARTIAL_BYTES = 2**29


@dataclass(frozen=True, eq=False)
class Step:
    """All that one forward pass over ``T`` tokens of a tree needs.

    Attributes:
        tokens: ``[T]`` int64 token ids, in depth-first order of the tree.
        positions: ``[T]`` int64 positions in their sequences.
        slots: ``[T]`` int64 pool slots that receive their K and V.
        logit_rows: ``[R]`` int64 rows whose logits are wanted, ascending.
        nodes: The tree as int32 tensors: start, length (tokens visible in this step), page_indptr, pages, first_slot.
        length: ``[nodes]`` that length on the host.
        kv_tokens_unshared: What the queries would read in one layer if no sequence shared.
        planned: The plan.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    nodes: list[Tensor]
    length: Ints
    kv_tokens_unshared: int
    planned: Planned

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def work(self) -> list[Tensor]:
        """The plan's arrays as int32 tensors, in the order in which the ops take them."""
        return self.planned.work

    @property
    def plan(self) -> Plan | GpuPlan:
        """The plan on the host; where a GPU made it, the first who asks waits for numpy to make the same."""
        return self.planned.plan

    @property
    def kv_tokens_read(self) -> int:
        """Token KVs that attention reads in one layer; reckoned when asked for, so best while the GPU runs the step."""
        return self.planned.kv_tokens_read(self.length)


@dataclass(eq=False)
class Planner:
    """Plans steps for one model shape, and keeps the last plan while its tree's structure stands.

    Every plan has tensors of its own, so steps stay good however many come after them.

    Attributes:
        shape: The attention heads.
        cost: Decides what is shared.
        num_sms: Plan for the CUDA kernels with so many blocks, one or two per multiprocessor; None plans for whatever takes a
            :class:`Plan`.
        gpu: What that GPU's paths cost.
        launch: Makes the same plans on the GPU, from a capacity and the tree to a plan's tensors; see
            ``cuda_planner.plan_on_gpu``.  None: numpy makes them, as it does what is too large.
        plans_made: How many plans were made, for tests and reports.
    """

    shape: HeadShape
    cost: CostModel = CPU_COST
    num_sms: int | None = None
    gpu: GpuCost = H200
    launch: Callable[[PlanCapacity, Tensor], list[Tensor]] | None = None
    plans_made: int = 0
    _key: tuple[object, ...] | None = field(default=None, repr=False)
    _planned: Planned | None = field(default=None, repr=False)

    def plan(
        self,
        snapshot: TreeSnapshot,
        queries: Queries,
        device: torch.device,
        beside: Callable[[], Sequence[Array]] = tuple,
    ) -> tuple[Planned, list[Tensor]]:
        """The plan for these queries on ``device``; remembered while nodes and row counts are unchanged.

        Args:
            snapshot, queries: What to plan for.
            device: Where the plan goes.
            beside: Called once the queries are known to be good, for int32 and int64 arrays that travel in the same copy.

        Returns:
            The plan, and the tensors of those arrays.

        Raises:
            ValueError: the queries leave out KV that they need.
        """
        key = (snapshot.tree, snapshot.version, queries.node.tobytes(), (queries.end - queries.begin).tobytes(), device)
        last = self._planned
        if last is not None and key == self._key:
            return last, upload(beside(), device)
        planned, tensors = self._on_gpu(snapshot, queries, device, beside) or self._on_host(
            snapshot, queries, device, beside
        )
        self._planned, self._key = planned, key
        self.plans_made += 1
        if log.isEnabledFor(logging.DEBUG):
            where = "the GPU" if planned.made is None else "the host"
            log.debug("plan %d by %s: %s", self.plans_made, where, describe(self._rows(snapshot, queries)))
        return planned, tensors

    def _on_gpu(
        self,
        snapshot: TreeSnapshot,
        queries: Queries,
        device: torch.device,
        beside: Callable[[], Sequence[Array]],
    ) -> tuple[Planned, list[Tensor]] | None:
        """Plan by ``launch``; None where it cannot, or should not."""
        if self.launch is None or self.num_sms is None:
            return None
        assert self.cost == self.gpu.sharing, "the GPU shares by its own cost"
        check_queries(snapshot, queries)
        room = room_for(snapshot, queries, self.shape, self.num_sms, self.gpu)
        if room.partials * self.shape.partial_bytes > MOST_PARTIAL_BYTES:
            log.debug("numpy plans: room for any plan of these queries is room for %d partial rows", room.partials)
            return None
        length, own = visible_lengths(snapshot, queries), queries.rows_per_node(snapshot.num_nodes)
        tree = _ints(np.concatenate((snapshot.parent, snapshot.subtree_end, length, own, [snapshot.num_nodes])))
        there, *tensors = upload([tree, *beside()], device)
        return self.planned_for(snapshot, queries, self.launch(room, there)), tensors

    def _on_host(
        self,
        snapshot: TreeSnapshot,
        queries: Queries,
        device: torch.device,
        beside: Callable[[], Sequence[Array]],
    ) -> tuple[Planned, list[Tensor]]:
        plan = self._specify(snapshot, queries)
        arrays = plan.arrays()
        tensors = upload([*map(_ints, arrays), *beside()], device)
        return self.planned_for(snapshot, queries, tensors[: len(arrays)], plan), tensors[len(arrays) :]

    def planned_for(
        self,
        snapshot: TreeSnapshot,
        queries: Queries,
        work: list[Tensor],
        plan: Plan | GpuPlan | None = None,
    ) -> Planned:
        """A plan of these queries that is in ``work`` already, or will be."""
        return Planned(work, snapshot, queries, self._specify, self._reads, plan)

    def _reads(self, snapshot: TreeSnapshot, queries: Queries) -> Reads:
        return Reads.of(snapshot, queries, self.shape, self.cost)

    def _rows(self, snapshot: TreeSnapshot, queries: Queries) -> BSR:
        return decompose(snapshot, queries, self.shape, self.cost)

    def _specify(self, snapshot: TreeSnapshot, queries: Queries) -> Plan | GpuPlan:
        rows = self._rows(snapshot, queries)
        if self.num_sms is None:
            return make_plan(rows, queries.num_rows)
        return make_gpu_plan(
            [rows],
            visible_lengths(snapshot, queries),
            queries.num_rows,
            group=self.shape.group,
            kv_heads=self.shape.kv_heads,
            num_sms=self.num_sms,
            cost=self.gpu,
        )


def planner_for(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> Planner:
    """The planner for what will run the ops: the CUDA kernels, or plain torch on the CPU or a GPU."""
    if device.type != "cuda":
        return Planner(shape)
    from prefixkit.backends.cuda.units import kernel_for
    from prefixkit.cuda.nvrtc import arch_for, supported_archs
    from prefixkit.ops.backend import choose

    if choose(device).name != "cuda" or dtype == torch.float32:
        return Planner(shape, H200.sharing)
    kernel = kernel_for(
        arch_for(torch.cuda.get_device_capability(device), supported_archs()), shape.head_dim, shape.group
    )
    if kernel is None:
        return Planner(shape, H200.sharing)
    from prefixkit.backends.cuda.cost_cache import gpu_cost

    gpu = gpu_cost(device) if kernel.by_maps else H200  # measured with Hopper's kernel where that is the one
    gpu = replace(gpu, sharing=replace(gpu.sharing, tile_heads=kernel.wide_rows))
    blocks = kernel.blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
    launch = None
    if shape.group <= kernel.wide_rows:
        from prefixkit.backends.cuda.planner import plan_on_gpu

        launch = partial(plan_on_gpu, shape, gpu, blocks)
    else:
        log.debug("numpy plans: the GPU's planner knows no groups above a tile's %d rows", kernel.wide_rows)
    return Planner(shape, gpu.sharing, num_sms=blocks, gpu=gpu, launch=launch)


def describe(rows: BSR) -> str:
    """One line that says which nodes are shared by how many queries, and how many rows stand alone."""
    shared = [
        f"node {rows.row_segments(row)[-1][0]} by {rows.q_end[row] - rows.q_begin[row]}"
        for row in np.flatnonzero(~rows.causal).tolist()
    ]
    alone = int(rows.causal.sum())
    return f"{len(shared)} shared reads ({', '.join(shared[:8])}{', ...' if len(shared) > 8 else ''}), {alone} own rows"


def build_step(
    snapshot: TreeSnapshot,
    queries: Queries,
    tokens: NDArray[np.integer],
    logit_rows: NDArray[np.integer],
    planner: Planner,
    device: torch.device | str = "cpu",
) -> Step:
    """Assemble the step that computes ``queries``.

    Args:
        snapshot: The tree, with room for the queries' KV already taken.
        queries: Which tokens run.
        tokens: ``[T]`` their ids, in row order.
        logit_rows: ``[R]`` rows whose logits are wanted.
        planner: Holds heads, costs and the remembered plan.
        device: Where the tensors go.

    Raises:
        ValueError: the queries leave out KV that they need, or ``tokens`` does not match them.
    """
    if len(tokens) != queries.num_rows:
        raise ValueError(f"the queries have {queries.num_rows} rows, but {len(tokens)} tokens were given")
    arrays: list[Array] = []

    def gather() -> list[Array]:
        node, offset = queries.row_node(), queries.row_offset()
        positions = snapshot.start[node].astype(np.int64) + offset
        longs = (tokens, positions, snapshot.slots(node, offset), logit_rows)
        length = visible_lengths(snapshot, queries)
        nodes = (snapshot.start, length, snapshot.page_indptr, snapshot.pages, snapshot.first_slot)
        arrays[:] = (*(np.asarray(array, dtype=np.int64) for array in longs), *map(_ints, nodes))
        return arrays

    planned, (ids, positions, slots, wanted, *nodes) = planner.plan(snapshot, queries, torch.device(device), gather)
    return Step(
        tokens=ids,
        positions=positions,
        slots=slots,
        logit_rows=wanted,
        nodes=nodes,
        length=_ints(arrays[5]),
        kv_tokens_unshared=int((arrays[1] + 1).sum()),
        planned=planned,
    )


def _ints(array: NDArray[np.integer]) -> Ints:
    return np.asarray(array, dtype=np.int32)
