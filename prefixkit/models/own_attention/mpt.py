"""MPT: ALiBi, as a bias that counts distances from the last key."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prefixkit.models.layered_cache import LayerCache
from prefixkit.models.own_attention.alibi_bias import mpt_bias
from prefixkit.models.own_attention.own_code import attended


def mpt(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    cache: LayerCache | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``MptAttention.forward``, whose mask is True where tokens are hidden."""
    assert cache is not None
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    shape = (*hidden_states.shape[:-1], self.n_heads, self.head_dim)
    q, k, v = (part.reshape(shape).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    mask = None if attention_mask is None else ~attention_mask
    bias = mpt_bias(self, self.n_heads)
    return self.out_proj(attended(self, cache, q, k, v, mask, float(self.softmax_scale), bias)), None
