"""The registered variant for the arguments that an attention class passes to its attention function."""

from __future__ import annotations

from torch import Tensor

from prefixkit.attention.variants import Variant, attention_sinks, compose, register, sliding_window, soft_cap


def register_variant(window: int | None, cap: float | None, sinks: Tensor | None, owner: object | None = None) -> str:
    """Register causal attention with these additions.

    Args:
        window: A query at position p sees keys at positions in ``(p - window, p]``; None for all.
        cap: Scores are bounded by ``cap * tanh(score / cap)``; None for no bound.
        sinks: ``[heads]`` logits that join the softmax's denominator; None for none.
        owner: Whose sinks these are: weights, whose numbers change, so the variant goes with its owner.  Variants
            without sinks are few, and stay.

    Returns:
        The variant's key, for the ops.
    """
    parts: list[Variant] = []
    if cap is not None:
        parts.append(soft_cap(cap))
    if window is not None:
        parts.append(sliding_window(window))
    if sinks is not None:
        parts.append(attention_sinks(sinks))
    return register(compose(*parts), None if sinks is None else owner)
