"""``linear_pair``, ``part_of_product``, and the errors of ``sum_parts`` and ``gather_parts``; see the ops."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from prefixkit.ops.arguments import check_pair
from prefixkit.ops.backend import BackendError

# Rows up to which one product is faster than two.  For 2 x 14,336 columns of width 4,096 on an H200, one product takes
# 58 us and two take 63 for 32 rows; 62 and 64 for 64 rows, 66 and 66 for 128, 347 and 304 for 1,024.
MOST_ROWS = 128


def linear_pair(x: Tensor, weight: Tensor) -> Tensor:
    """``linear_pair``."""
    check_pair(x, weight)
    rows = x.numel() // max(1, x.shape[-1])
    if rows <= MOST_ROWS:
        return linear(x, weight)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    flat = x.reshape(rows, x.shape[-1])
    for part, half in zip(out.view(rows, -1).chunk(2, dim=1), weight.chunk(2), strict=True):
        torch.mm(flat, half.t(), out=part)
    return out


def part_of_product(x: Tensor, weight: Tensor) -> Tensor:
    """``part_of_product``; the op has checked its arguments."""
    return linear(x.float(), weight.float())


def sum_parts(part: Tensor, *others: object) -> Tensor:
    """Raises BackendError: only the memory of GPUs is shared by two processes."""
    raise _no_memory("sum_parts", part, "sum by torch.distributed.all_reduce")


def gather_parts(part: Tensor, *others: object) -> Tensor:
    """Raises BackendError, likewise."""
    raise _no_memory("gather_parts", part, "gather by torch.distributed.all_gather")


def _no_memory(op: str, part: Tensor, remedy: str) -> BackendError:
    return BackendError(f"{op}: plain torch has none, and {part.device} runs plain torch; {remedy}")
