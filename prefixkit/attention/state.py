"""Partial attention states and their exact merge.

Attention over a set of keys is a pair ``(out, lse)``: the softmax-weighted mean of the values, and the logarithm of the
softmax's denominator.  States over disjoint sets of keys merge into the state over their union (FlashInfer, section 2.2;
Cascade inference), in any order up to rounding.

The logarithm is the natural one, here and everywhere in prefixkit, of the scaled and modified scores:
``lse = log(sum(exp(score)))``.  The state over no keys is ``out = 0``, ``lse = -inf``; merging it changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class State:
    """Attention of some queries over some keys.

    Attributes:
        out: ``[rows, heads, head_dim]`` float32 (float64 in the reference).
        lse: ``[rows, heads]`` of the same dtype, natural logarithm.
    """

    out: Tensor
    lse: Tensor


def empty_state(rows: int, heads: int, head_dim: int, *, device: torch.device | str = "cpu") -> State:
    """The float32 state of ``rows`` queries over no keys at all."""
    out = torch.zeros(rows, heads, head_dim, dtype=torch.float32, device=device)
    return State(out, torch.full((rows, heads), -math.inf, dtype=torch.float32, device=device))


def merge(a: State, b: State) -> State:
    """The state over the union of two disjoint sets of keys.

    Where one side is empty the result is the other side, bit for bit; where both are, it is empty again, never NaN.

    Example:
        >>> whole = merge(State(out_left, lse_left), State(out_right, lse_right))
    """
    top = torch.maximum(a.lse, b.lse)
    base = top.masked_fill(top == -math.inf, 0.0)  # -inf minus -inf would be NaN
    weight_a, weight_b = torch.exp(a.lse - base), torch.exp(b.lse - base)
    total = weight_a + weight_b
    lse = base + torch.log(total)  # log(0) is -inf, as it should
    total = total.masked_fill(total == 0, 1.0)
    out = a.out * (weight_a / total).unsqueeze(-1) + b.out * (weight_b / total).unsqueeze(-1)
    return State(out, lse)
