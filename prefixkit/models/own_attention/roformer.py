"""RoFormer as a decoder: rotary embedding of queries and keys, and maybe of values."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from prefixkit.models.layer import LayerCache


def roformer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    sinusoidal_pos: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    past_key_values: LayerCache | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``RoFormerSelfAttention.forward``."""
    assert past_key_values is not None and encoder_hidden_states is None, "a decoder alone"
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    q, k, v = (of(hidden_states).view(shape).transpose(1, 2) for of in (self.query, self.key, self.value))
    if self.rotary_value:
        q, k, v = self.apply_rotary_position_embeddings(sinusoidal_pos, q, k, v)
    else:
        q, k = self.apply_rotary_position_embeddings(sinusoidal_pos, q, k)
    k, v = past_key_values.update(k, v, self.layer_idx)
    past_key_values.check(k, v, attention_mask)
    out = past_key_values.attend(q, 1 / math.sqrt(self.attention_head_size), None, None, None)
    return out.flatten(2), None
