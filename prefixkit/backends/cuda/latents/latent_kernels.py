"""Attention of a layer over latents by our kernels: both parts, and their merge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from prefixkit.attention.planner import StepPlan
from prefixkit.attention.variants import CAUSAL
from prefixkit.backends.cuda.device_planner import PLAN_TENSORS
from prefixkit.backends.cuda.kernels import merge_unit
from prefixkit.backends.cuda.kv import describe
from prefixkit.backends.cuda.latents import expansion
from prefixkit.backends.cuda.latents.expansion import Expansion
from prefixkit.backends.cuda.layouts import MERGE_STATES
from prefixkit.backends.torch import latent_attention
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch


class Maps(expansion.Maps, Protocol):
    """The linear maps of a layer (see ``models.latents``)."""

    copied: slice

    def shift(self, q: Tensor) -> Tensor | None: ...


def attend(
    q: Tensor,
    pages: Sequence[Tensor],
    maps: Maps,
    positions: Tensor,
    plans: tuple[StepPlan, StepPlan],
    scale: float,
) -> Tensor:
    """Attention of ``q [T, heads, k_dim]``: ``[T, heads, v_dim]`` in q's dtype.

    Args:
        q: Queries; their elements ``maps.copied`` are multiplied with rotary keys directly.
        pages: The pages of latents and of rotary keys.
        maps: The layer's maps.
        positions: ``[T]`` int64.
        plans: The plans of the expanded and of the absorbed part.
        scale: Factor on scores.
    """
    expanded, absorbed = plans
    found = []
    if _any(expanded):
        rows, at = _of(expanded, q, positions)
        assert isinstance(expanded.owners, Expansion), "made with the plan"
        k, v, rotary = expanded.owners.of(pages, maps)
        if maps.copied.stop < q.shape[2]:  # the kernel takes the rotary part last
            rows = torch.cat((rows[..., maps.made], rows[..., maps.copied]), 2)
        plan = expanded.tensors[:PLAN_TENSORS]
        of_rows = torch.ops.prefixkit.tree_attention(rows, k, v, at, plan, scale, CAUSAL.name, None, rotary)
        found.append((*of_rows, expanded.tensors[PLAN_TENSORS][: len(q)]))
    if _any(absorbed):
        rows, at = _of(absorbed, q, positions)
        out, lse = torch.ops.prefixkit.latent_attention(
            absorb(rows, maps), *pages, at, absorbed.tensors[:PLAN_TENSORS], scale
        )
        shift = maps.shift(rows)
        found.append(
            (values(out, maps), lse if shift is None else lse + scale * shift, absorbed.tensors[PLAN_TENSORS][: len(q)])
        )
    if len(found) == 1:
        whole: Tensor = found[0][0]
        return whole
    merged: Tensor = torch.ops.prefixkit.merge_states(*found[0], *found[1])
    return merged


def absorb(q: Tensor, maps: Maps) -> Tensor:
    """Absorb queries: ``[rows, heads, k_dim]`` to ``[rows, heads, latent + rotary]``, for latents and rotary keys."""
    latent, rotary = maps.key.shape[2], maps.copied.stop - maps.copied.start
    out = q.new_empty((*q.shape[:2], latent + rotary))
    torch.bmm(q[..., maps.made].transpose(0, 1), maps.key, out=out[..., :latent].transpose(0, 1))
    out[..., latent:] = q[..., maps.copied]
    return out


def values(out: Tensor, maps: Maps) -> Tensor:
    """Values from means of latents: ``[rows, heads, latent]`` to ``[rows, heads, v_dim]``."""
    made = out.new_empty((*out.shape[:2], maps.value.shape[1]))
    torch.bmm(out.transpose(0, 1), maps.value.transpose(1, 2), out=made.transpose(0, 1))
    return made if maps.value_bias is None else made.add_(maps.value_bias)


def merge_states(
    first: Tensor,
    first_lse: Tensor,
    first_place: Tensor,
    second: Tensor,
    second_lse: Tensor,
    second_place: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``merge_states``; in plain torch if the result is float32 or the head size is no multiple of 8."""
    dtype = dtype or first.dtype
    if dtype == torch.float32 or first.shape[2] % 8 or (first.data_ptr() | second.data_ptr()) & 15:
        return latent_attention.merge_states(first, first_lse, first_place, second, second_lse, second_place, dtype)
    rows, (heads, v_dim) = len(first_place), first.shape[1:]
    out = first.new_empty((rows, heads, v_dim), dtype=dtype)
    tensors = first, second, first_lse, second_lse, first_place, second_place, out
    vectors, function = heads * v_dim // 8, _merge(dtype == torch.float16, first.dtype != dtype, out.device.index)
    grid, values = (max(1, -(-rows * vectors // 256)), 1, 1), (*map(Tensor.data_ptr, tensors), rows, heads, vectors)
    launch(function, MERGE_STATES, values, grid, 256, 0, describe("merge_states", out))
    return out


@cache
def _merge(half: bool, of_float32: bool, device: int) -> jit.Function:
    unit = merge_unit(half, of_float32)
    return MERGE_STATES.check(jit.load(unit, device)[unit.names[0]])


def _any(plan: StepPlan) -> bool:
    """Whether the plan has query rows."""
    return plan.rows is None or len(plan.rows) > 0


def _of(plan: StepPlan, q: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The plan's queries and their positions."""
    return (q, positions) if plan.rows is None else (q[plan.rows], positions[plan.rows])
