"""How our replacement bodies read and write states in the cache that transformers' own code would use."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def layer_of(module: Any, cache: Any) -> Any:
    """The ``LinearAttentionLayer`` of a cache that holds a module's states.

    A module that does not store its own index uses the cache's first such layer.
    """
    index = getattr(module, "layer_idx", None)
    if index is not None:
        return cache.layers[index]
    return next(layer for layer in cache.layers if hasattr(layer, "recurrent_states"))


def state_before(layer: Any) -> Tensor | None:
    """The recurrent state before these tokens; None at the start of a text."""
    state: Tensor | None = layer.recurrent_states[0] if layer.has_previous_state[0] else None
    return state


def hold(layer: Any, state: Tensor) -> None:
    """Store the recurrent state after these tokens."""
    layer.update_recurrent_state(state)
    layer.has_previous_state[0] = True  # a layer without a convolution sets this flag nowhere else
