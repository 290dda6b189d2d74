"""The contract of the op that makes digests of memory (see ``library``)."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixkit.ops.arguments import expect

ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def digest(words: Tensor, start: int, total: Tensor) -> None:
    """Add each word, times an odd number that depends on its place, to a sum modulo 2**64.

    A change of one word always changes the sum; an exchange of words, and a change of several, do except by chance.
    Which odd numbers these are is the backend's choice: sums of two devices are not compared.

    Args:
        words: ``[count]`` int64 or uint8, contiguous.
        start: The place of the first word.
        total: ``[1]`` int64, the sum; written.

    Raises:
        BadShape, BadDtype, BadDevice: an argument does not fit.
    """
    op = "digest"
    fits = words.ndim == 1 and words.is_contiguous()
    expect(op, "words", words, "[count], contiguous", fits, (torch.int64, torch.uint8))
    expect(op, "total", total, "[1]", total.shape == (1,), (torch.int64,), words.device)


def odd_numbers(start: int, count: int, device: torch.device) -> Tensor:
    """``[count]`` odd numbers, one for each place from ``start`` on.

    Multiples of one number would not do: where a change adds or subtracts the same in each word, as other signs of all
    numbers do, their sum may be 0, for 16 words in one of 200 cases.
    """
    mixed = torch.arange(start, start + count, dtype=torch.int64, device=device) * ODD
    return (mixed ^ (mixed >> 29 & (1 << 35) - 1)) | 1  # a logical shift, as in csrc/memory/digest.cu
