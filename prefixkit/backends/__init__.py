"""Implementations of the ops: plain torch, and our CUDA kernels.  Importing this package registers them."""

from __future__ import annotations

from functools import cache

import torch

from prefixkit.ops.backend import Backend, Choice, register


@cache
def _torch() -> Backend:
    from prefixkit.backends.torch import kv, plan_tree, planner, run, sampling

    appends = kv.kv_append, kv.rotary_append
    return Backend(
        "torch", planner.planner_for, *appends, run.tree_attention, kv.advance, sampling.sample, plan_tree.plan_tree
    )


@cache
def _cuda() -> Backend:
    from prefixkit.backends.cuda import attention, kv, plan_launch, planner, sampling

    ops = kv.kv_append, kv.rotary_append, attention.tree_attention, kv.advance, sampling.sample, plan_launch.plan_tree
    return Backend("cuda", planner.planner_for, *ops, planner.graph_planning)


def _probe_cuda(device: torch.device) -> Choice:
    from prefixkit.backends.cuda.probe import probe

    return probe(device)


register("torch", _torch)
register("cuda", _cuda, _probe_cuda)
