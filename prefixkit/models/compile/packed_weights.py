"""Packed weights: several weights in one block of memory, so that one product reads them all and none is stored twice.

Each weight keeps a storage of its own, over its part of that memory: tools that save models drop, or refuse, weights
that share a storage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from prefixkit.models.weights.borrowed import borrowed, parts_of
from prefixkit.threads import EventCount
from prefixkit.torch_private import tensors_over

# Kernels load vectors of this number of bytes: the address of each weight must be a multiple of it.
ALIGN = 16
# The attribute of a packed weight's storage: a number that all weights of one pack share.
_PACK = "_prefixkit_pack"
_moves = EventCount()


def packed_view(weights: Sequence[Tensor]) -> Tensor | None:
    """The rows of contiguous weights as one tensor over their memory, where each begins at the end of the one before.

    Args:
        weights: ``[rows, ...]`` each, alike except for the number of rows.

    Returns:
        ``[all rows, ...]`` without a gradient, valid for as long as the weights live; None if the weights are not
        packed in this order.
    """
    if any(one.data_ptr() + one.nbytes != other.data_ptr() for one, other in pairwise(weights)):
        return None
    first = weights[0]
    shape = (sum(len(weight) for weight in weights), *first.shape[1:])
    return borrowed(first.data_ptr(), first.device, shape, first.stride(), first.dtype)


def movable(weights: Sequence[Tensor]) -> bool:
    """Whether these weights, all different, are the only tensors over their memory, so that moving them frees it."""
    if len({id(weight) for weight in weights}) < len(weights):
        return False
    # CPU memory may be shared with other processes; for GPU memory this cannot be found out.
    if any(weight.device.type == "cpu" and weight.untyped_storage().is_shared() for weight in weights):
        return False
    storages = Counter(weight.untyped_storage()._cdata for weight in weights)
    return all(tensors_over(weight) == storages[weight.untyped_storage()._cdata] for weight in weights)


def pack(weights: Sequence[Tensor]) -> Tensor:
    """Move weights into one block of memory, each the same tensor object with the same values.

    During the call these weights are in memory twice.

    Args:
        weights: ``[rows, ...]`` each, contiguous, alike except for the number of rows, and :func:`movable`.

    Returns:
        All weights as one tensor, as :func:`packed_view` returns it.
    """
    # Parameters that are not inference tensors must not become inference tensors.
    with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
        whole = torch.cat([weight.detach() for weight in weights])
        if whole.is_cuda:  # another stream may still read the memory that is freed
            torch.cuda.synchronize(whole.device)
        for weight, part in zip(weights, torch.split(whole, [len(weight) for weight in weights]), strict=True):
            weight.data = torch.from_dlpack(part)  # type: ignore[attr-defined]  # its storage keeps the whole alive
    number = _moves.add()
    for weight in weights:
        setattr(weight.untyped_storage(), _PACK, number)
    return whole


def unpack(weights: Iterable[Tensor]) -> None:
    """Give packed weights memory of their own again, each the same tensor object with the same values.

    At any time at most the weights of one :func:`pack` are in memory twice.  Packed memory is freed once no tensor over
    it is left; a tensor that is not passed here, such as an entry of a state dict, stays where it is.

    Args:
        weights: Any tensors; those that are not packed stay as they are.
    """
    packs: dict[int, list[Tensor]] = defaultdict(list)
    for weight in [part for given in weights for part in parts_of(given)]:
        # Weights of other types or layouts were never packed, and may have no storage.
        strided = type(weight) is nn.Parameter and weight.layout == torch.strided
        if strided and (number := getattr(weight.untyped_storage(), _PACK, 0)):
            packs[number].append(weight)
    for members in packs.values():
        with torch.inference_mode(members[0].is_inference()), torch.no_grad():
            # One copy for each storage: parameters that were tied while they were packed stay tied.
            storages = {weight.untyped_storage()._cdata: weight.untyped_storage() for weight in members}
            copies = {handle: storage.clone() for handle, storage in storages.items()}  # type: ignore[no-untyped-call]
            if members[0].is_cuda:  # another stream may still read the memory that is freed
                torch.cuda.synchronize(members[0].device)
            for weight in members:
                copy = copies[weight.untyped_storage()._cdata]
                empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
                weight.data = empty.set_(copy, weight.storage_offset(), weight.shape, weight.stride())
            storages.clear()
        _moves.add()


def moves() -> int:
    """How often weights of any model have been moved in this process."""
    return _moves.count
