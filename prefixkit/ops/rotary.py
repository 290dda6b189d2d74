"""Rotary position embedding in plain torch: what ``rotary_append`` computes."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each head's halves rotated (Su et al., RoFormer; the halves as in Llama), in float32, rounded once.

    Args:
        x: ``[T, heads, head_dim]``.
        cos, sin: ``[T, head_dim]``.

    Returns:
        As ``x``, contiguous.
    """
    x32, half = x.float(), x.shape[-1] // 2
    rotated = torch.cat((-x32[..., half:], x32[..., :half]), dim=-1)
    return (x32 * cos.float()[:, None] + rotated * sin.float()[:, None]).to(x.dtype).contiguous()
