"""All changes of an attention layer's scores as one variant: those of the layer itself, and its user's variant."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from prefixkit.attention.variants import (
    CAUSAL,
    Variant,
    attention_sinks,
    chunked,
    compose,
    register,
    sliding_window,
    soft_cap,
)
from prefixkit.attention.visible import Visible

# Per user's variant (weakly, so that its tensors are freed with it): the variants composed with it, and their keys.
_Asked = tuple[Visible, float | None, bool, Variant | None]
_composed: WeakKeyDictionary[Variant, dict[_Asked, tuple[Variant | None, str]]] = WeakKeyDictionary()


def register_variant(
    visible: Visible, cap: float | None, sinks: bool, bias: Variant | None = None, user: Variant | None = None
) -> str:
    """The key of causal attention with what a layer applies: first a bias, then a cap (None: no cap), the visible range
    and sinks, and last its user's variant (:func:`prefixkit.patch` explains the order).

    The key is valid while the user's variant exists; ``user`` is a part that an op computes (``Variant.parts``).
    """
    asked = visible, cap, sinks, bias
    known = _composed.setdefault(CAUSAL if user is None else user, {})
    if asked not in known:
        parts: list[Variant] = [] if bias is None else [bias]
        causal = user is None or not user.looks_ahead  # else a layer's own range bounds only tokens before a query
        if cap is not None:
            parts.append(soft_cap(cap))
        if visible.window is not None:
            parts.append(sliding_window(visible.window, causal))
        if visible.chunk is not None:
            parts.append(chunked(visible.chunk, causal))
        if sinks:
            parts.append(attention_sinks())
        composed = compose(*parts) if user is None else compose(*parts, user)
        known[asked] = None if composed is user else composed, register(composed)
    return known[asked][1]
