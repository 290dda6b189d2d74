"""``digest`` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

# Words of the accumulator: it stays in the cache while words stream through.
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def digest(words: Tensor, start: int, total: Tensor) -> None:
    """``digest``; the op has checked its arguments."""
    block = min(len(words), _BLOCK.get(words.device.type, _BLOCK["cuda"]))
    if not block:
        return
    sums = torch.zeros(block, dtype=torch.int64, device=words.device)
    for part in torch.split(words, block):
        there = sums[: len(part)]
        torch.add(part, there, alpha=_ODD, out=there)
    total += (sums * weights(start, block, words.device)).sum()


def weights(start: int, count: int, device: torch.device) -> Tensor:
    """``[count]`` odd numbers, one for each place."""
    return (torch.arange(start, start + count, dtype=torch.int64, device=device) * 2 + 1) * _ODD
