"""What an attention layer does to scores, as one variant: what it asks for itself, and what its user adds."""

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

# By the user's variant, whose tensors are free once it goes: what layers apply, which is known while it exists.
_Asked = tuple[Visible, float | None, bool, Variant | None]
_composed: WeakKeyDictionary[Variant, dict[_Asked, tuple[Variant | None, str]]] = WeakKeyDictionary()


def register_variant(
    visible: Visible, cap: float | None, sinks: bool, bias: Variant | None = None, user: Variant | None = None
) -> str:
    """The key of causal attention with what a layer asks for: what is visible, a cap, None for none, sinks, and a
    variant besides, which is first; and with its user's variant, which is last (:func:`prefixkit.patch` says why).

    The key is good as long as the user's variant exists, of which it takes what an op computes (``Variant.parts``).
    """
    asked = visible, cap, sinks, bias
    known = _composed.setdefault(CAUSAL if user is None else user, {})
    if asked not in known:
        parts: list[Variant] = [] if bias is None else [bias]
        causal = user is None or not user.looks_ahead  # a layer's own range then bounds only what is before a query
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
