"""Attention at positions in the cache (StreamingLLM): to sinks and to a window, with a query of each row for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit


class Rotated(NamedTuple):
    """The queries of a step, rotated for one part of their keys.

    Attributes:
        q: ``[T, heads, head_dim]``.
        positions: ``[T]`` int64 the queries' positions relative to these keys.
        plan: The part's plan.
        variant: The part's key (``Variant.parts``).
    """

    q: Tensor
    positions: Tensor
    plan: Sequence[Tensor]
    variant: str


def streaming_attention(
    window: Rotated, sinks: Rotated, pages: Sequence[Tensor], scale: float, logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention to the window and to the sinks, merged by log-sum-exp.

    Args:
        window, sinks: The queries for the two parts.
        pages: The pages of K and of V.
        scale: Factor on ``q . k``.
        logits: ``[heads]`` logits that join the softmax's denominator, if the variant has any.

    Returns:
        ``out [T, heads, v_dim]`` and ``lse [T, heads]``, as ``tree_attention``.
    """
    ops = torch.ops.prefixkit
    place = torch.arange(window.q.shape[0], dtype=torch.int32, device=window.q.device)
    near, far = (
        ops.tree_attention(part.q, *pages, part.positions, part.plan, scale, part.variant, own)
        for part, own in ((window, logits), (sinks, None))
    )
    return ops.merge_states(*near, place, *far, place, window.q.dtype), torch.logaddexp(near[1], far[1])
