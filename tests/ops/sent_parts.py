"""What ``sum_parts`` computes: the specification of its numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(part: Tensor) -> Tensor:
    """The numbers that cross the link for a float32 part of a sum in 16 bits, and that its own process adds too.

    Eight adjacent numbers are multiples of 2**(e - 13), from -16,384 to 16,383 of them, where 2**e is the power of two
    of the largest, at least 2**-113.  If one of the eight is not finite, all are cut to six bits behind the first.
    """
    eight = part.reshape(-1, 8).double()
    exponent = eight.abs().amax(1, keepdim=True).frexp().exponent - 1
    step = torch.ldexp(torch.ones_like(eight), exponent.clamp(min=-113) - 13)
    whole = (eight / step).round().clamp(max=16383) * step
    cut = (part.reshape(-1, 8).view(torch.int32) & ~0x1FFFF).view(torch.float32).double()
    cut = torch.where(eight.isnan(), eight, cut)
    return torch.where(eight.isfinite().all(1, keepdim=True), whole, cut).float().view(part.shape)


def sum_of(parts: list[Tensor], dtype: torch.dtype, *residuals: Tensor) -> Tensor:
    """The sum of two float32 parts in ``dtype``, and of up to two residuals."""
    one, other = parts if dtype == torch.float32 else map(sent, parts)
    total = (one + other).to(dtype)
    if not residuals:
        return total
    added = residuals[0].float() if len(residuals) == 1 else residuals[0].float() + residuals[1].float()
    return (added + total.float()).to(dtype)
