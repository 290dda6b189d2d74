"""RemBERT, Megatron-BERT, BigBird with full attention, and RoFormer, as decoders."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from prefixkit.models.layered_cache import LayerCache
from prefixkit.models.own_attention.own_code import attended


def bert(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    cache: LayerCache | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``RemBertSelfAttention.forward``, and those of Megatron-BERT and BigBird."""
    assert cache is not None and encoder_hidden_states is None, "a decoder alone"
    q, k, v = _heads(self, hidden_states)
    return attended(self, cache, q, k, v, attention_mask, 1 / math.sqrt(self.attention_head_size)), None


def roformer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    sinusoidal_pos: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    cache: LayerCache | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``RoFormerSelfAttention.forward``: rotary embedding of queries and keys, and of values if the config says so."""
    assert cache is not None and encoder_hidden_states is None, "a decoder alone"
    q, k, v = _heads(self, hidden_states)
    if self.rotary_value:
        q, k, v = self.apply_rotary_position_embeddings(sinusoidal_pos, q, k, v)
    else:
        q, k = self.apply_rotary_position_embeddings(sinusoidal_pos, q, k)
    return attended(self, cache, q, k, v, attention_mask, 1 / math.sqrt(self.attention_head_size)), None


def _heads(module: Any, hidden_states: Tensor) -> list[Tensor]:
    """Queries, keys and values, ``[batch, heads, rows, head_dim]`` each."""
    shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    return [of(hidden_states).view(shape).transpose(1, 2) for of in (module.query, module.key, module.value)]
