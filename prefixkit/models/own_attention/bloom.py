"""Bloom: ALiBi."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from prefixkit.models.layered_cache import LayerCache
from prefixkit.models.own_attention.alibi_bias import linear_bias
from prefixkit.models.own_attention.own_code import attended


def bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: LayerCache | None = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``BloomAttention.forward``."""
    assert layer_past is not None
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    bias = linear_bias(self, self.num_heads)
    out = self.dense(attended(self, layer_past, q, k, v, attention_mask, self.inv_norm_factor, bias))
    return residual + nn.functional.dropout(out, self.hidden_dropout, self.training), None
