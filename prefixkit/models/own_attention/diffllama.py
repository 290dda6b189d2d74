"""DiffLlama: the scores of a head weigh the values of two KV heads, one from each half of the KV heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prefixkit.models.layered_cache import Bias, LayerCache


class TwoValues:
    """The cache of a layer that attends twice with the same keys: to its first half of the values, then to its last.

    The pool holds both pairs of K and V, so that one call of the op computes both.
    """

    def __init__(self, layer: LayerCache) -> None:
        self._layer = layer
        self._second: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        both = [half.repeat(1, 2, 1, 1) for half in value_states.chunk(2, dim=1)]
        self._kv = self._layer.update(key_states.repeat(1, 2, 1, 1), torch.cat(both, 1), layer_idx, *args, **kwargs)
        return key_states, value_states

    def check(self, key: Tensor, value: Tensor, attention_mask: Any) -> None:
        if self._second is None:
            self._layer.check(*self._kv, attention_mask)

    def attend(
        self,
        query: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
        sinks: Tensor | None,
        bias: Bias | None = None,
    ) -> Tensor:
        if self._second is not None:
            return self._second
        both = self._layer.attend(query.repeat(1, 2, 1, 1), scale, window, cap, sinks, bias)
        first, self._second = both.chunk(2, dim=2)
        return first


def halves(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """K and V as ``DiffLlamaAttention`` caches them."""
    quarter = value.shape[1] // 4
    return key[:, : 2 * quarter], torch.cat([value[:, :quarter], value[:, 2 * quarter : 3 * quarter]], 1)
