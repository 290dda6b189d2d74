"""GPT-J, CodeGen, GPT-NeoX-Japanese and GPT-Neo, whose classes compute attention in a method ``_attn``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefixkit.models.layered_cache import LayerCache
from prefixkit.models.own_attention.own_code import shown


def gptj(
    module: Any, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """``GPTJAttention._attn``, and CodeGen's: CodeGen's rotated keys are cached in another dtype than its queries'."""
    layer.check(key, value, attention_mask)
    out = layer.attend(query.to(value.dtype), 1 / module.scale_attn, None, None, None)
    return out.transpose(1, 2), None


def gpt_neox_japanese(
    module: Any, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """``GPTNeoXJapaneseAttention._attn``."""
    layer.check(key, value, attention_mask)
    return layer.attend(query, 1 / module.norm_factor, None, None, None).transpose(1, 2), None


def gpt_neo(
    module: Any, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """``GPTNeoSelfAttention._attn``: scores have no scale, and the window of local layers is not in the mask."""
    window = module.config.window_size if module.attention_type == "local" else None
    layer.check(key, value, _in_window(shown(attention_mask), window))
    return layer.attend(query, 1.0, window, None, None).transpose(1, 2), None


def _in_window(mask: Tensor | None, window: int | None) -> Tensor | None:
    """A mask of the visible tokens, limited to a window as well."""
    if mask is None or window is None:
        return mask
    queries, keys = mask.shape[-2:]
    last = torch.arange(keys - queries, keys, device=mask.device)[:, None]
    return mask & (torch.arange(keys, device=mask.device) > last - window)
