"""``expert_product`` in plain torch, one expert at a time; the host waits to learn which experts have rows."""

from __future__ import annotations

import torch
from torch import Tensor


def expert_product(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, per: int) -> Tensor:
    """``expert_product``."""
    flat = index.reshape(-1)
    out = x.new_zeros((len(flat), weight.shape[2]))
    for expert in torch.unique(flat).tolist():
        if 0 <= expert < len(weight):
            pairs = (flat == expert).nonzero()[:, 0]
            rows, matrix = x[pairs // per], weight[expert]
            out[pairs] = rows @ matrix if bias is None else torch.addmm(bias[expert], rows, matrix)
    return out
