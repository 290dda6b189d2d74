"""What pools of tests and benchmarks hold."""

from __future__ import annotations

import torch

from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.layer_kinds import CachedTensor


def spec_of_alike(
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> KVSpec:
    """A spec of identical layers with K and V of equal size; ValueError as :class:`KVSpec`, or for a size below 1."""
    return KVSpec(((CachedTensor(kv_heads, head_dim),) * 2,) * num_layers, dtype, torch.device(device))
