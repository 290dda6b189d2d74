"""Numbers for a workload: several sets of pages of random K and V, and the same numbers in each rival's best layout.

``benchmarks/compare.py`` calls ``Pool``, ``make`` and ``ours`` in every checkout.
"""

import time
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

import prefixkit.backends  # noqa: F401  (registers them)
from benchmarks.runner import input_sets, replay_us
from benchmarks.tree_attention.workloads import HEAD_DIM, PAGE, Level, Workload, levels
from prefixkit.attention.planner import Planner
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import Step, build_step
from prefixkit.ops import library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.ops.backend import backend_for, graph_plannings

GPU = torch.device("cuda")


class Pool:
    """Random pages ``[pages, kv_heads, page size, head size]``, made once and shared by all workloads."""

    def __init__(self) -> None:
        self._pages: tuple[Tensor, Tensor] | None = None

    def take(self, pages: int, kv_heads: int, head_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
        """K and V of this many pages."""
        elements = pages * kv_heads * PAGE * head_dim
        if self._pages is None or self._pages[0].numel() < elements:
            self._pages = None  # freed before the new ones, or both would have to fit
            self._pages = tuple(torch.empty(elements, device=GPU, dtype=torch.bfloat16).normal_() for _ in "kv")
        k, v = (flat[:elements].view(pages, kv_heads, PAGE, head_dim) for flat in self._pages)
        return k, v


@dataclass(eq=False)
class Inputs:
    """One workload's tensors: for each set ``q [rows, heads, head size]``, ``k`` and ``v`` as in :class:`Pool`.

    ``page_order`` is the page table; ``step`` has plan and tree on the device; ``plan_ms`` is the time of planning.
    """

    workload: Workload
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    page_order: np.ndarray
    step: Step
    plan_ms: float

    @property
    def sets(self) -> int:
        return len(self.q)

    @property
    def scale(self) -> float:
        return float(self.workload.head_dim**-0.5)

    @cached_property
    def levels(self) -> list[Level] | None:
        return levels(self.workload.snapshot, self.page_order)

    def dense(self, level: Level, pages: Tensor) -> Tensor:
        """``[nodes, kv_heads, tokens, head size]`` a level's K or V, contiguous."""
        taken = pages[torch.from_numpy(level.pages.astype(np.int64)).to(GPU)]
        return taken.transpose(1, 2).flatten(2, 3)


def planner_for(heads: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Planner:
    return backend_for(device).planner_for(HeadShape(heads, kv_heads, head_dim, dtype.itemsize), device, dtype)


def make(workload: Workload, pool: Pool, shuffled: bool = False) -> Inputs:
    """A decode step's inputs; ``shuffled`` distributes the tree's pages randomly over the pool."""
    pages = workload.snapshot.pages
    if shuffled:
        pages[:] = np.random.default_rng(0).permutation(len(pages))[pages]
    return prepare(workload, workload.queries, pool)


def prepare(workload: Workload, queries: Queries, pool: Pool) -> Inputs:
    """Plan a step over a workload's tree, and take its numbers from the pool."""
    snapshot = workload.snapshot
    pages, rows = int(snapshot.page_indptr[-1]), queries.num_rows
    planner = planner_for(workload.heads, workload.kv_heads, workload.head_dim, GPU, torch.bfloat16)
    tree, tokens = StepTree(snapshot, queries), np.zeros(rows, dtype=np.int64)
    torch.cuda.synchronize()
    began = time.perf_counter()
    planner.plan(tree, GPU)
    torch.cuda.synchronize()
    plan_ms = (time.perf_counter() - began) * 1e3
    step = build_step(tree, tokens, tokens[:0], planner, GPU)
    sets = input_sets(workload.kv_bytes)
    k, v = pool.take(sets * pages, workload.kv_heads, workload.head_dim)
    q = [torch.randn(rows, workload.heads, workload.head_dim, device=GPU).bfloat16() for _ in range(sets)]
    return Inputs(workload, q, list(k.split(pages)), list(v.split(pages)), snapshot.pages, step, plan_ms)


def in_e4m3(inputs: Inputs) -> Inputs:
    """The same step over pages that hold its numbers in e4m3."""
    of = inputs.workload
    shape, tokens = HeadShape(of.heads, of.kv_heads, of.head_dim, 1), np.zeros(of.queries.num_rows, dtype=np.int64)
    planner = backend_for(GPU).planner_for(shape, GPU, torch.bfloat16)
    step = build_step(StepTree(of.snapshot, of.queries), tokens, tokens[:0], planner, GPU)
    k, v = ([pages.to(torch.float8_e4m3fn) for pages in sets] for sets in (inputs.k, inputs.v))
    return replace(inputs, k=k, v=v, step=step)


def captured_plan_us(workload: Workload) -> float:
    """Microseconds of the plan that a captured step makes, which equals the plan outside of graphs."""
    planner = planner_for(workload.heads, workload.kv_heads, workload.head_dim, GPU, torch.bfloat16)
    tree, plannings = StepTree(workload.snapshot, workload.queries), graph_plannings(GPU, [planner])
    assert plannings is not None, "our kernels run these heads"
    (planning,) = plannings
    captured = planning.planner(workload.snapshot.num_nodes, planning.capacity_for(tree), GPU)
    captured.upload(tree)
    return replay_us(lambda _: captured.plan(), repeats=10)


def ours(inputs: Inputs, index: int) -> Tensor:
    """``[rows, heads, head size]`` by prefixkit."""
    step, attend = inputs.step, torch.ops.prefixkit.tree_attention
    k, v = inputs.k[index].transpose(1, 2), inputs.v[index].transpose(1, 2)
    return attend(inputs.q[index], k, v, step.positions, step.plan, inputs.scale, "causal")[0]
