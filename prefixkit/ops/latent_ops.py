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

    All heads read one key for each token, its latent and then its rotary key, and its latent as its value.

    Args:
        q: ``[T, heads, latent + rotary]`` in the pages' dtype, absorbed: a head's product with what makes its keys.
        latent_pages: ``[pages, page_size, 1, latent]``.
        rotary_pages: ``[pages, page_size, 1, rotary]``.
        q_positions: ``[T]`` int64.
        plan: ``Step.plan``, made by the device's planner for these latents.
        scale: Factor on ``q . k``.

    Returns:
        ``out [T, heads, latent]`` in q's dtype, of which a head's product with what makes its values is its output;
        ``lse [T, heads]`` float32, natural logarithm.
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
    """Merge two partial states of attention, of some rows of a step each, by their log-sum-exps.

    Args:
        first, second: ``[their rows, heads, v_dim]`` in one dtype, float32 or the result's.
        first_lse, second_lse: ``[their rows, heads]`` float32, natural logarithm.
        first_place, second_place: ``[T]`` int32 of each row of the step its row in the state, -1 for none.
        dtype: Of the result; None: theirs.

    Returns:
        ``[T, heads, v_dim]``; 0 for a row that neither has, or that sees nothing.
    """
    arguments.check_states(first, first_lse, first_place, second, second_lse, second_place, dtype)
    return first.new_empty((first_place.shape[0], *first.shape[1:]), dtype=dtype or first.dtype)
