"""Packed weights: several weights in one piece of memory, so that one product reads them all and none is stored twice.

Each weight keeps a storage of its own, over its part of that memory: tools that save models drop, or refuse, weights that have
a storage in common.
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


def packed_view(weights: Sequence[Tensor]) -> Tensor | None:
    """The rows of contiguous weights as one tensor over their memory, where each begins at the end of the one before.

    Args:
        weights: ``[rows, ...]`` each, alike but for the number of rows.

    Returns:
        ``[all rows, ...]`` without a gradient, valid for as long as the weights live; None if the weights are not packed in
        this order.
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
    """Whether these weights, all different, are the only tensors over their memory, so that moving them frees it."""
    if len({id(weight) for weight in weights}) < len(weights):
        return False
    # CPU memory may be shared with other processes; for GPU memory this cannot be found out.
    if any(weight.device.type == "cpu" and weight.untyped_storage().is_shared() for weight in weights):
        return False
    storages = Counter(weight.untyped_storage()._cdata for weight in weights)
    return all(_holders(weight) == storages[weight.untyped_storage()._cdata] for weight in weights)


def pack(weights: Sequence[Tensor]) -> Tensor:
    """Move weights into one piece of memory, each the same tensor object with the same values.

    During the call these weights are in memory twice.

    Args:
        weights: ``[rows, ...]`` each, contiguous, alike but for the number of rows, and :func:`movable`.

    Returns:
        All of them as one tensor, as :func:`packed_view` gives it.
    """
    # Parameters that are no inference tensors must not become some.
    with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
        whole = torch.cat([weight.detach() for weight in weights])
        if whole.is_cuda:  # another stream may still read the memory that is freed
            torch.cuda.synchronize(whole.device)
        for weight, part in zip(weights, torch.split(whole, [len(weight) for weight in weights]), strict=True):
            weight.data = torch.from_dlpack(part)  # type: ignore[attr-defined]  # its storage keeps the whole alive
    global _moves
    _moves += 1
    return whole


def moves() -> int:
    """How often weights of any model have been moved in this process."""
    return _moves


def _holders(tensor: Tensor) -> int:
    """Tensors over the memory of this one."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - _OWN_REFERENCES


def _own_references() -> int:
    storage = torch.empty(1).untyped_storage()  # no tensor is left over it
    return torch._C._storage_Use_Count(storage._cdata)


# What the question itself adds to the count.
_OWN_REFERENCES = _own_references()
