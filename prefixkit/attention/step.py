"""One forward pass: which tokens run, where their KV goes, and how they attend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.cost import CPU_COST, CostModel, HeadShape
from prefixkit.attention.formats import BSR, Queries, all_rows, decompose, visible_lengths
from prefixkit.attention.gpu_buffers import GpuPlanBuffers
from prefixkit.attention.gpu_cost import H200, GpuCost
from prefixkit.attention.gpu_plan import WIDE_ROWS, GpuPlan, make_gpu_plan
from prefixkit.attention.plan import Plan, make_plan
from prefixkit.tree.snapshot import Ints, TreeSnapshot

log = logging.getLogger("prefixkit")


@dataclass(frozen=True, eq=False)
class Step:
    """All that one forward pass over ``T`` tokens of a tree needs.

    Attributes:
        tokens: ``[T]`` int64 token ids, in depth-first order of the tree.
        positions: ``[T]`` int64 positions in their sequences.
        slots: ``[T]`` int64 pool slots that receive their K and V.
        logit_rows: ``[R]`` int64 rows whose logits are wanted, ascending.
        work: The plan's arrays as int32 tensors, in the order in which the ops take them.
        nodes: The tree as int32 tensors: start, length (tokens visible in this step), page_indptr, pages, first_slot.
        plan: The plan behind ``work``.
        kv_tokens_read: Token KVs that attention reads in one layer.
        kv_tokens_unshared: What the same queries would read if no sequence shared.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    work: list[Tensor]
    nodes: list[Tensor]
    plan: Plan | GpuPlan
    kv_tokens_read: int
    kv_tokens_unshared: int

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


@dataclass(eq=False)
class Planner:
    """Plans steps for one model shape, and keeps the last plan while the tree's structure stands.

    Attributes:
        shape: The attention heads.
        cost: Decides what is shared.
        num_workers: Workers to balance over.
        num_sms: Plan for the CUDA kernels with so many blocks, one or two per multiprocessor; None plans for whatever takes a
            :class:`Plan`.
        wide_rows: Query heads of those kernels' wide tiles.
        gpu: What that GPU's paths cost.
        buffers: Where GPU plans go, so that a captured graph survives new ones: one asynchronous copy, and the tensors of an
            earlier step hold the later plan.  None gives every plan tensors of its own.
        plans_made: How many plans were computed, for tests and reports.
    """

    shape: HeadShape
    cost: CostModel = CPU_COST
    num_workers: int = 1
    num_sms: int | None = None
    wide_rows: int = WIDE_ROWS
    gpu: GpuCost = H200
    buffers: GpuPlanBuffers | None = None
    plans_made: int = 0
    _key: tuple[object, ...] | None = field(default=None, repr=False)
    _plan: tuple[Plan | GpuPlan, list[Tensor]] | None = field(default=None, repr=False)

    def plan(
        self, snapshot: TreeSnapshot, queries: Queries, device: torch.device
    ) -> tuple[Plan | GpuPlan, list[Tensor]]:
        """The plan for these queries and its tensors on ``device``; remembered while nodes and row counts are unchanged.

        Raises:
            PlanTooLarge: it does not fit ``buffers``; the last plan stays.
        """
        key = (snapshot.version, queries.node.tobytes(), (queries.end - queries.begin).tobytes(), device)
        if self._plan is None or key != self._key:
            formats, plan = self._make(snapshot, queries)
            self._plan = plan, self._placed(plan, device)
            self._key = key
            self.plans_made += 1
            if log.isEnabledFor(logging.DEBUG):
                log.debug("plan %d: %s", self.plans_made, describe(formats))
        return self._plan

    def _placed(self, plan: Plan | GpuPlan, device: torch.device) -> list[Tensor]:
        if self.buffers is None or isinstance(plan, Plan):
            return _tensors(plan.arrays(), device)
        return self.buffers.fill(plan)

    def _make(self, snapshot: TreeSnapshot, queries: Queries) -> tuple[Sequence[BSR], Plan | GpuPlan]:
        length, rows = visible_lengths(snapshot, queries), queries.num_rows
        group, kv_heads = self.shape.group, self.shape.kv_heads
        if self.num_sms is None:
            formats = decompose(snapshot, queries, self.shape, self.cost)
            return formats, make_plan(formats, length, rows, group=group, num_workers=self.num_workers)
        alike = [all_rows(snapshot, queries, self.shape, self.cost)]  # the GPU's plan has no use for tile classes
        return alike, make_gpu_plan(
            alike,
            length,
            rows,
            group=group,
            kv_heads=kv_heads,
            num_sms=self.num_sms,
            wide_rows=self.wide_rows,
            cost=self.gpu,
        )


def planner_for(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> Planner:
    """The planner for what will run the ops: the CUDA kernels, or plain torch on the CPU or a GPU."""
    if device.type != "cuda":
        return Planner(shape)
    from prefixkit.attention.backend import choose
    from prefixkit.attention.cuda_units import kernel_for
    from prefixkit.attention.nvrtc import arch_for, supported_archs

    if choose(device).name != "cuda" or dtype == torch.float32:
        return Planner(shape, H200.sharing)
    kernel = kernel_for(
        arch_for(torch.cuda.get_device_capability(device), supported_archs()), shape.head_dim, shape.group
    )
    if kernel is None:
        return Planner(shape, H200.sharing)
    from prefixkit.attention.gpu_cost_cache import gpu_cost

    gpu = gpu_cost(device) if kernel.by_maps else H200  # measured with Hopper's kernel where that is the one
    blocks = kernel.blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
    return Planner(shape, gpu.sharing, num_sms=blocks, wide_rows=kernel.wide_rows, gpu=gpu)


def describe(formats: Sequence[BSR]) -> str:
    """One line that says which nodes are shared by how many queries, and how many rows stand alone."""
    shared = [
        f"node {bsr.row_segments(row)[-1][0]} by {bsr.q_end[row] - bsr.q_begin[row]}"
        for bsr in formats
        for row in range(bsr.num_rows)
        if not bsr.causal[row]
    ]
    alone = sum(int(bsr.causal.sum()) for bsr in formats)
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
    target = torch.device(device)
    plan, work = planner.plan(snapshot, queries, target)
    length = visible_lengths(snapshot, queries)
    node, offset = queries.row_node(), queries.row_offset()
    positions = snapshot.start[node].astype(np.int64) + offset
    return Step(
        tokens=_long(tokens, target),
        positions=_long(positions, target),
        slots=_long(snapshot.slots(node, offset), target),
        logit_rows=_long(logit_rows, target),
        work=work,
        nodes=_tensors((snapshot.start, length, snapshot.page_indptr, snapshot.pages, snapshot.first_slot), target),
        plan=plan,
        kv_tokens_read=plan.kv_tokens_read(length),
        kv_tokens_unshared=int((positions + 1).sum()),
    )


def _long(values: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)


def _tensors(arrays: tuple[Ints, ...], device: torch.device) -> list[Tensor]:
    # Copies: a snapshot's arrays may be views of buffers that the tree goes on writing.
    return [torch.from_numpy(np.array(array, dtype=np.int32)).to(device) for array in arrays]
