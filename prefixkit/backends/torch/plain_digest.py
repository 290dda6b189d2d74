"""``digest`` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixkit.ops.digest_op import ODD, odd_numbers

# Words of the accumulator: it stays in the cache while words stream through.
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}


def digest(words: Tensor, start: int, total: Tensor) -> None:
    """``digest``; the op has checked its arguments."""
    block = min(len(words), _BLOCK.get(words.device.type, _BLOCK["cuda"]))
    if not block:
        return
    sums = torch.zeros(block, dtype=torch.int64, device=words.device)
    for part in torch.split(words, block):
        there = sums[: len(part)]
        torch.add(part, there, alpha=ODD, out=there)
    total += (sums * odd_numbers(start, block, words.device)).sum()
