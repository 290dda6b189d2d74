"""Cases of the CPU tests, moved to the GPU: pages head-major as KVPool makes them, outputs' memory poisoned first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from prefixkit.attention.plan import Plan
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CostModel
from prefixkit.attention.variants import lookup
from prefixkit.backends.cuda import kernels
from prefixkit.backends.cuda.device_planner import WORK_TENSORS, over_tree, say_plain_torch
from prefixkit.backends.cuda.kernels import kernel_for
from prefixkit.backends.torch.host_planner import bind
from prefixkit.cuda.launch import LaunchCache
from prefixkit.cuda.nvrtc import arch_for, supported_archs
from prefixkit.ops import backend
from prefixkit.ops.arguments import FP8
from prefixkit.testing.forests import Case, gpu_plan_of, int_tensors, node_tensors, plan_of
from prefixkit.threads import once

GPU = torch.device("cuda")


def forget_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has launched no kernel of attention, and said nothing of one."""
    monkeypatch.setattr(backend.backend_for(torch.device("cuda")).tree_attention, "launches", LaunchCache())
    monkeypatch.setattr(kernels, "first_named", once(kernels.named_kernel))
    say_plain_torch.clear()


@dataclass(frozen=True, eq=False)
class OnGpu:
    """Arguments of ``tree_attention`` in the op's order, but for the variant.

    ``step`` is the plan as a planner makes it: the work and the tree for the kernels, a handle for plain torch.
    """

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    q_positions: Tensor
    plan: list[Tensor]
    scale: float
    sinks: Tensor | None
    step: StepPlan

    @property
    def nodes(self) -> list[Tensor]:
        """The tree's tensors: start, length, page_indptr, pages, first_slot; of a plan for the kernels."""
        return self.plan[WORK_TENSORS:]

    def arguments(self, variant: str = "causal") -> tuple[object, ...]:
        sinks = self.sinks if lookup(variant).has_sinks else None
        return self.q, self.k_pages, self.v_pages, self.q_positions, self.plan, self.scale, variant, sinks


def head_major(pages: Tensor) -> Tensor:
    """``[pages, page_size, kv_heads, head_dim]`` on the GPU with strides that put a page's heads end to end."""
    return pages.to(GPU).transpose(1, 2).contiguous().transpose(1, 2)


def by_torch(case: Case) -> bool:
    """Whether plain torch runs the case, whatever its variant."""
    return case.q.dtype == torch.float32 or backend.choose(GPU).name == "torch"


def planned(case: Case, cost: CostModel, **options: int) -> Plan:
    """A plan for what runs the case: for the kernels, with the options of ``gpu_plan_of``, or for plain torch."""
    if by_torch(case):
        return plan_of(case, cost)
    options.setdefault("num_sms", torch.cuda.get_device_properties(GPU).multi_processor_count)
    return gpu_plan_of(case, cost, **options | item_rows(case))


def item_rows(case: Case) -> dict[str, int]:
    """The options of ``gpu_plan_of`` for the kernel that runs the case: how many rows its items hold."""
    arch = arch_for(torch.cuda.get_device_capability(GPU), supported_archs())
    kernel = kernel_for(arch, case.shape.head_dim, case.shape.gqa_group, e4m3=case.k_pages.dtype == FP8)
    return {} if kernel is None else {"tile_rows": kernel.tile_rows, "decode_rows": kernel.decode_rows}


def on_gpu(case: Case, plan: Plan) -> OnGpu:
    """The case with a plan as the device's planner makes it."""
    tree = StepTree(case.snapshot, case.queries)
    if by_torch(case):
        step = bind(plan, tree)
    else:
        work, nodes = ([t.to(GPU) for t in part] for part in (int_tensors(*plan.arrays()), node_tensors(case)))
        step = over_tree(StepPlan(work, tree, lambda: plan), nodes, tree)
    return OnGpu(
        case.q.to(GPU),
        head_major(case.k_pages),
        head_major(case.v_pages),
        case.positions.to(GPU),
        step.tensors,
        case.scale,
        None if case.sinks is None else case.sinks.to(GPU),
        step,
    )


def poison(elements: int = 1 << 24) -> None:
    """Fill free memory with NaN, so that an output that is not written shows."""
    blocks = [torch.full((elements >> shift,), torch.nan, device=GPU) for shift in (0, 2, 4, 8, 12, 16)]
    del blocks
