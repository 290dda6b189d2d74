"""Weights laid side by side in memory, so that several can be read as one, and none is kept twice.

Each keeps a storage of its own, over its part: those who save models drop, or refuse, weights that have one in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

_moves = 0
# Kernels load vectors of so many bytes: each weight must begin at a multiple.
ALIGN = 16


def joined(weights: Sequence[Tensor]) -> Tensor | None:
    """The rows of contiguous weights as one tensor over their memory, where each lies right behind the one before.

    Args:
        weights: ``[rows, ...]`` each, alike but for the number of rows.

    Returns:
        ``[all rows, ...]`` without a gradient, or None if they lie anywhere else.  It is there for as long as the weights are.
    """
    if any(one.data_ptr() + one.nbytes != other.data_ptr() for one, other in pairwise(weights)):
        return None
    first = weights[0]
    shape = (sum(len(weight) for weight in weights), *first.shape[1:])
    memory = torch._C._construct_storage_from_data_pointer(
        first.data_ptr(), first.device, sum(weight.nbytes for weight in weights)
    )
    return torch.empty(0, dtype=first.dtype, device=first.device).set_(memory, 0, shape, first.stride())


def movable(weights: Sequence[Tensor]) -> bool:
    """Whether nothing but these weights, all different, holds their memory: moving them frees it, and leaves nobody behind."""
    if len({id(weight) for weight in weights}) < len(weights):
        return False
    # CPU memory may be other processes' too; of a GPU's nobody knows.
    if any(weight.device.type == "cpu" and weight.untyped_storage().is_shared() for weight in weights):
        return False
    storages = Counter(weight.untyped_storage()._cdata for weight in weights)
    return all(_holders(weight) == storages[weight.untyped_storage()._cdata] for weight in weights)


def join(weights: Sequence[Tensor]) -> Tensor:
    """Lay weights side by side, each the same tensor object with the same values, and return :func:`joined` of them.

    For as long as this takes, these weights are in memory twice.
    """
    # Parameters that are no inference tensors must not become some.
    with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
        whole = torch.cat([weight.detach() for weight in weights])
        if whole.is_cuda:  # the memory that is freed may belong to another stream
            torch.cuda.synchronize(whole.device)
        for weight, part in zip(weights, torch.split(whole, [len(weight) for weight in weights]), strict=True):
            weight.data = torch.from_dlpack(part)  # type: ignore[attr-defined]  # its storage holds the whole one's
    global _moves
    _moves += 1
    return whole


def moves() -> int:
    """How often weights have been laid elsewhere in this process, of whatever model."""
    return _moves


def _holders(tensor: Tensor) -> int:
    """Tensors over the memory of this one."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - _OURS


def _own_references() -> int:
    storage = torch.empty(1).untyped_storage()  # its tensor is gone
    return torch._C._storage_Use_Count(storage._cdata)


# What our asking adds to the count.
_OURS = _own_references()
