"""Implementations of the ops: plain torch, and our CUDA kernels.  Importing this package registers them."""

from __future__ import annotations

from functools import cache

import torch

from prefixkit.ops.backend import Backend, Choice, register


@cache
def _torch() -> Backend:
    from prefixkit.backends.torch import host_planner, plain_kv, plain_sampling, plan_tree, run_program

    appends = plain_kv.kv_append, plain_kv.rotary_append
    return Backend(
        "torch",
        host_planner.planner_for,
        *appends,
        run_program.tree_attention,
        plain_kv.advance,
        plain_sampling.sample,
        plan_tree.plan_tree,
    )


@cache
def _cuda() -> Backend:
    from prefixkit.backends.cuda import attention, device_planner, kv, plan_launch, sampling

    ops = kv.kv_append, kv.rotary_append, attention.tree_attention, kv.advance, sampling.sample, plan_launch.plan_tree
    return Backend("cuda", device_planner.planner_for, *ops, device_planner.graph_planning)


def _probe_cuda(device: torch.device) -> Choice:
    from prefixkit.backends.cuda.probe import probe

    return probe(device)


register("torch", _torch)
register("cuda", _cuda, _probe_cuda)
