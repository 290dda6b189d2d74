"""Attention of a step's layer over latents in two parts, merged by log-sum-exp."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from prefixkit.attention.latent_parts import LatentPart, Part
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import Step
from prefixkit.models.latents.latent_maps import EXPAND, maps_of
from prefixkit.ops.backend import backend_for, part_backend, plain_torch
from prefixkit.ops.partial_states import State, merge_rows

log = logging.getLogger("prefixkit")


def attend_latents(
    module: nn.Module,
    pages: Sequence[Tensor],
    shape: HeadShape,
    step: Step,
    plans: tuple[StepPlan, StepPlan],
    q: Tensor,
    scale: float,
    variant: str,
) -> Tensor:
    """``q [T, heads, k_dim]`` to ``[T, heads, v_dim]`` in its dtype.

    Args:
        module: The attention module, whose ``expand_kv`` makes K and V.
        pages: The pages of latents and of rotary keys.
        shape: The heads of K and V.
        step: The step in progress.
        plans: The plans of the expanded and of the absorbed part.
        q, scale, variant: As for ``tree_attention``; the variant does not change scores and has no sinks.
    """
    expanded, absorbed = plans
    if len(expanded.tensors) > 1:  # made for kernels
        kernels, sizes = backend_for(q.device).attend_latents, [of.shape[3] for of in pages]
        maps = maps_of(module, sizes[0], sizes[1], pages[0], lambda: sys.maxsize)
        assert kernels is not None, "its backend has made the plans"
        if maps is not None and maps.rotary is None:
            return kernels(q, pages, maps, step.positions, plans, scale)
        expanded, absorbed = plain_plans(shape, sizes, plans, q)
    found: list[tuple[State, Tensor | None]] = []
    if (rows := _rows(expanded, q, step)) is not None:
        attend = part_backend(q.device, Part.EXPANDED).attend
        found.append((_expand(attend, module, pages, rows, expanded, scale, variant), expanded.rows))
    if (rows := _rows(absorbed, q, step)) is not None:
        found.append((_absorb(module, pages, shape, rows, absorbed, scale, variant), absorbed.rows))
    return merge_rows(found, len(q)).out.to(q.dtype)


def plain_plans(shape: HeadShape, sizes: Sequence[int], plans: tuple[StepPlan, ...], q: Tensor) -> list[StepPlan]:
    """The plans of both parts for plain torch, if the layer's maps are not as they were measured; logs that."""
    log.warning("attention over latents runs in plain torch: K and V are no longer linear in what is cached")
    parts = [LatentPart(part, shape, *sizes) for part in (Part.EXPANDED, Part.ABSORBED)]
    planners = [plain_torch().latent_parts[part.part].planner_for(part, q.device, q.dtype, 1) for part in parts]
    return [planner.plan(plan.tree, q.device)[0] for planner, plan in zip(planners, plans, strict=True)]


def _rows(plan: StepPlan, q: Tensor, step: Step) -> tuple[Tensor, Tensor] | None:
    """The queries of a part and their positions; None if the part has no queries."""
    if plan.rows is None:
        return q, step.positions
    return (q[plan.rows], step.positions[plan.rows]) if len(plan.rows) else None


def _expand(
    attend: Any,
    module: nn.Module,
    pages: Sequence[Tensor],
    rows: tuple[Tensor, Tensor],
    plan: StepPlan,
    scale: float,
    variant: str,
    **shape: HeadShape,
) -> State:
    q, positions = rows
    state: State = attend(q, pages, getattr(module, EXPAND), positions, plan.tensors, scale, variant, **shape)
    return State(state.out.float(), state.lse)


def _absorb(
    module: nn.Module,
    pages: Sequence[Tensor],
    shape: HeadShape,
    rows: tuple[Tensor, Tensor],
    plan: StepPlan,
    scale: float,
    variant: str,
) -> State:
    q, positions = rows
    latent, rotary = (of.shape[3] for of in pages)
    maps = maps_of(module, latent, rotary, pages[0], lambda: plan.kv_tokens_read(plan.tree.length))
    if maps is None:  # the same rows, by expanding K and V
        attend = plain_torch().latent_parts[Part.EXPANDED].attend
        return _expand(attend, module, pages, rows, plan, scale, variant, shape=shape)
    attend = part_backend(q.device, Part.ABSORBED).attend
    out, lse = attend(maps.absorb(q), pages, positions, plan.tensors, scale, variant)
    shift = maps.shift(q)
    return State(maps.values(out), lse if shift is None else lse + scale * shift)
