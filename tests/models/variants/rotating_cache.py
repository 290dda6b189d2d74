"""StreamingLLM as its authors have it: a cache of unrotated keys, all rotated anew at each token, at positions in the
cache.  transformers runs the model's own code, with an identity in the place of rotary embedding; each layer attends
token by token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "prefixkit_test_rotating_cache"

Rotate = Callable[[Tensor, Tensor], Tensor]  # x [heads, T, dim], positions [T]


class RotatingCache:
    """Unrotated keys, and values, of the tokens that a layer has seen, ``[kv_heads, T, dim]``."""

    def __init__(self, sinks: int, window: int, rotate: Rotate | None, slopes: Tensor | None = None) -> None:
        self.sinks, self.window, self.rotate, self.slopes = sinks, window, rotate, slopes
        self.kv: tuple[Tensor, Tensor] | None = None

    def take(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """With the K and V of one more token, evicted to sinks and window."""
        if self.kv is not None:
            key, value = (torch.cat((old, new), 1) for old, new in zip(self.kv, (key, value), strict=True))
        if key.shape[1] > self.sinks + self.window:
            gone = self.sinks
            key, value = (torch.cat((of[:, :gone], of[:, gone + 1 :]), 1) for of in (key, value))
        self.kv = key, value
        return key, value


def token_by_token(
    model: nn.Module,
    tokens: Sequence[int],
    sinks: int,
    window: int,
    rotate: Rotate | None,
    slopes: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> Tensor:
    """``[len(tokens), vocab]`` logits; ``rotate`` is the model's rotary embedding; ``layers``: which stream."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = NAME
        if hasattr(module, "layer_idx"):
            chosen = layers is None or module.layer_idx in layers
            module.__dict__[NAME] = RotatingCache(sinks, window if chosen else 10**6, rotate, slopes)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(_identity)
    with torch.no_grad():
        logits: Tensor = other(torch.tensor([list(tokens)], device=other.device), use_cache=False).logits[0]
    return logits


def _identity(module: nn.Module, args: Any, made: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of YaRN, keys and queries keep their factor."""
    cos, sin = made
    return torch.full_like(cos, getattr(module, "attention_scaling", 1.0)), torch.zeros_like(sin)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    cache: RotatingCache = module.__dict__[NAME]
    rows = [
        _row(cache, *(of[0, :, at : at + 1] for of in (query, key, value)), scaling, softcap, s_aux)
        for at in range(query.shape[2])
    ]
    return torch.cat(rows, 1).transpose(0, 1)[None], None


def _row(
    cache: RotatingCache,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """``[heads, 1, dim]`` of one more token."""
    k, v = cache.take(key, value)
    at = torch.arange(k.shape[1], device=k.device)
    if cache.rotate is not None:
        k, q = cache.rotate(k, at), cache.rotate(q, at[-1:])
    groups = q.shape[0] // k.shape[0]
    plain = softcap is None and cache.slopes is None and s_aux is None
    if plain and q.dtype in (torch.bfloat16, torch.float16):  # by torch's own kernel, whose error is the measure
        return scaled_dot_product_attention(q[None], k[None], v[None], scale=scaling, enable_gqa=True)[0]
    scores = q.double() @ k.repeat_interleave(groups, 0).transpose(1, 2).double() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if cache.slopes is not None:
        scores = scores + cache.slopes.double()[:, None, None] * (at - at[-1])
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.double()[:, None, None]), -1)
    out = scores.softmax(-1)[..., : len(at)] @ v.repeat_interleave(groups, 0).double()
    return out.to(q.dtype)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)
