"""The contracts of ops over latents (see ``library``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.ops import arguments


def latent_attention(
    q: Tensor, latent_pages: Tensor, rotary_pages: Tensor, q_positions: Tensor, plan: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of ``T`` queries over a tree of latents: multi-head latent attention, absorbed.

    All heads read the same key of each token, its latent followed by its rotary key, and the same value, its latent.

    Args:
        q: ``[T, heads, latent + rotary]`` in the pages' dtype, absorbed: multiplied by the matrix
            that makes the head's keys from latents.
        latent_pages: ``[pages, page_size, 1, latent]``.
        rotary_pages: ``[pages, page_size, 1, rotary]``.
        q_positions: ``[T]`` int64.
        plan: ``Step.plan``, made by the device's planner for these latents.
        scale: Factor on ``q . k``.

    Returns:
        ``out [T, heads, latent]`` in q's dtype, which multiplied by the matrix that makes a head's values from latents
        gives the head's output; ``lse [T, heads]`` float32, natural logarithm.
    """
    arguments.check_latents(q, latent_pages, rotary_pages, q_positions)
    return q.new_empty((*q.shape[:2], latent_pages.shape[3])), q.new_empty(q.shape[:2], dtype=torch.float32)


def merge_states(
    first: Tensor,
    first_lse: Tensor,
    first_place: Tensor,
    second: Tensor,
    second_lse: Tensor,
    second_place: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Merge two partial states of attention by their log-sum-exps; each has some rows of a step.

    Args:
        first, second: ``[rows of the state, heads, v_dim]`` in one dtype, float32 or the result's.
        first_lse, second_lse: ``[rows of the state, heads]`` float32, natural logarithm.
        first_place, second_place: ``[T]`` int32 the row of the state for each row of the step, -1 for none.
        dtype: The result's dtype; None: that of the states.

    Returns:
        ``[T, heads, v_dim]``; 0 for a row that is in neither state, or that sees no key.
    """
    arguments.check_states(first, first_lse, first_place, second, second_lse, second_place, dtype)
    return first.new_empty((first_place.shape[0], *first.shape[1:]), dtype=dtype or first.dtype)
