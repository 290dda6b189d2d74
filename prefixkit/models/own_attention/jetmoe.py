"""JetMoE: the query heads of all experts of a token share KV heads, whose whole list is repeated after caching."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prefixkit.models.layered_cache import Bias, LayerCache


class HeadsInTurn:
    """The cache of a layer whose query head ``h`` of ``n * kv_heads`` attends to KV head ``h % kv_heads``."""

    def __init__(self, layer: LayerCache) -> None:
        self._layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._kv = self._layer.update(key_states, value_states, layer_idx, *args, **kwargs)
        return self._kv

    def check(self, key: Tensor, value: Tensor, attention_mask: Any) -> None:
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
        batch, heads, rows, dim = query.shape
        kv_heads = self._kv[0].shape[1]
        grouped = query.view(batch, -1, kv_heads, rows, dim).transpose(1, 2).reshape(query.shape)
        out = self._layer.attend(grouped, scale, window, cap, sinks, bias)
        return out.view(batch, rows, kv_heads, -1, dim).transpose(2, 3).reshape(batch, rows, heads, dim)
