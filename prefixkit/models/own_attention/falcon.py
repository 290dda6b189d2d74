"""Falcon: rotary embedding or ALiBi, with one, some or all KV heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from prefixkit.models.layered_cache import LayerCache
from prefixkit.models.own_attention.alibi_bias import rounded_bias
from prefixkit.models.own_attention.own_code import attended, function_of_module, shown


def falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: LayerCache | None = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``FalconAttention.forward``.

    The newer architecture repeats KV heads before it caches them; a pool holds each head once, see :func:`repeated`.
    """
    assert layer_past is not None and position_embeddings is not None
    q, k, v = (part.transpose(1, 2) for part in self._split_heads(self.query_key_value(hidden_states)))
    if self.new_decoder_architecture:
        k, v = (of[:, :: self.num_heads // self.num_kv_heads] for of in (k, v))
    if not self.config.alibi:
        q, k = function_of_module(self, "apply_rotary_pos_emb")(q, k, *position_embeddings)
    bias = None
    if self.config.alibi:  # eager attention adds ALiBi to the scores, and again through the mask
        times = 1 if self.config._attn_implementation == "sdpa" else 2
        bias = rounded_bias(self, self.num_heads, times * self.inv_norm_factor)
    return self.dense(attended(self, layer_past, q, k, v, shown(attention_mask), self.inv_norm_factor, bias)), None


def repeated(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """K and V as ``FalconAttention`` caches them."""
    of: Any = module
    times = of.num_heads // of.num_kv_heads if of.new_decoder_architecture else 1
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
