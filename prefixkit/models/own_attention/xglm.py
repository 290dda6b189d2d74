"""XGLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prefixkit.models.layered_cache import LayerCache
from prefixkit.models.own_attention.own_code import attended


def xglm(
    self: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    cache: LayerCache | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``XGLMAttention.forward``."""
    assert cache is not None and key_value_states is None, "a decoder alone"
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (of(hidden_states).view(shape).transpose(1, 2) for of in (self.q_proj, self.k_proj, self.v_proj))
    return self.out_proj(attended(self, cache, q * self.scaling, k, v, attention_mask, 1.0)), None
