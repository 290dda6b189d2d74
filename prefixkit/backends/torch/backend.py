"""The torch backend: plain torch on a CPU, and on a GPU that our kernels do not serve."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.attention.gpu_cost import H200
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.attention.variants import lookup
from prefixkit.backends.torch.advance import advance
from prefixkit.backends.torch.append import kv_append, rotary_append
from prefixkit.backends.torch.plan_tree import plan_tree
from prefixkit.backends.torch.planner import TorchPlanner, find_plan
from prefixkit.backends.torch.run import run_program
from prefixkit.backends.torch.sampling import sample
from prefixkit.ops.backend import Backend, NotCapturable
from prefixkit.ops.checks import BadShape, capturing, check_attention


def tree_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, q_positions: Tensor, plan: Sequence[Tensor], scale: float, variant: str
) -> tuple[Tensor, Tensor]:
    """``tree_attention``; ``plan`` ends with the handle of a :class:`~prefixkit.backends.torch.planner.BoundPlan`."""
    check_attention(q, k_pages, v_pages, q_positions)
    if capturing(q):
        raise NotCapturable(
            "tree_attention: the torch backend lists its calls on the host for each step, which a CUDA graph cannot "
            "capture; run eagerly, or use the CUDA kernels (`prefixkit env` says why they are not in use)"
        )
    if not plan:
        raise BadShape("tree_attention: plan must be the tensors of Step.plan, got none")
    bound = find_plan(plan[-1])
    rows = bound.tree.queries.num_rows
    if rows != q.shape[0]:
        raise BadShape(f"tree_attention: the plan is for {rows} queries, but q has {q.shape[0]} rows")
    program = bound.program(k_pages.shape, q.shape[1], q.dtype, q.device, variant)
    return run_program(program, q, k_pages, v_pages, scale, lookup(variant))


def planner_for(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> TorchPlanner:
    """The planner for a CPU, or for plain torch on a GPU."""
    return TorchPlanner(shape, CPU_COST if device.type == "cpu" else H200.sharing)


BACKEND = Backend("torch", planner_for, kv_append, rotary_append, tree_attention, advance, sample, plan_tree)
