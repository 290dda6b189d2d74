"""Which memory the values of a weight are in: a number for each storage, which packing carries along.

An address does not identify memory: memory that is freed is given out again.  So each storage gets a number when it is
first asked about, an attribute of the storage itself.  Packed weights (``compile/packed_weights.py``) lie elsewhere but
have the same values, and keep the number of the memory that they came from.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

# The attribute of a storage that has its Memory.
_MEMORY = "_prefixkit_memory"
_numbers = itertools.count(1)
_lock = threading.Lock()
_steps: int | None = None  # None: nothing counts them yet


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known of the memory under a storage.

    Attributes:
        number: Of this memory alone, in this process.
        shift: Bytes that a packed weight's storage began after the beginning of the memory with this number.
        writes: Steps of optimizers over it.
        address: Of the storage when the number was given: a storage that has been resized has other memory.
    """

    number: int
    shift: int
    writes: int
    address: int


def memory_of(storage: UntypedStorage) -> Memory:
    """What is known of a storage's memory; the first question, or the first after a resize, gives it a new number."""
    known: Memory | None = getattr(storage, _MEMORY, None)
    address = storage.data_ptr()
    if known is None or known.address != address:
        known = Memory(next(_numbers), 0, 0, address)
        setattr(storage, _MEMORY, known)
    return known


def carry(memory: Memory, storage: UntypedStorage, shift: int = 0) -> None:
    """Let ``storage`` have the number of the memory that its values were copied from, from ``shift`` bytes on."""
    setattr(storage, _MEMORY, replace(memory, shift=memory.shift + shift, address=storage.data_ptr()))


def borrowed(
    begin: int, device: torch.device, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """A tensor over memory that others hold: contiguous rows from an address on, valid for as long as they hold it."""
    size = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
    memory = torch._C._construct_storage_from_data_pointer(begin, device, size)
    return torch.empty(0, dtype=dtype, device=device).set_(memory, 0, tuple(shape), tuple(stride))


def optimizer_steps() -> int:
    """Steps of all optimizers since the first question, by torch's hook for it.

    Fused optimizers write to parameters and leave torch's version counters as they are.
    """
    global _steps
    with _lock:
        if _steps is None:
            register_optimizer_step_post_hook(_count_step)
            _steps = 0
        return _steps


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory that a tensor consists of: itself, or the inner ones of a quantised or sharded weight."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    inner = [getattr(tensor, name) for name in flatten()[0]]  # a sharded weight's mesh may be among them
    return [part for one in inner if isinstance(one, Tensor) for part in parts_of(one)]


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    global _steps
    _steps = (_steps or 0) + 1
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            for part in parts_of(tensor):
                try:
                    storage = part.untyped_storage()
                except (RuntimeError, NotImplementedError):  # of another layout: torch counts what is written to it
                    continue
                known: Memory | None = getattr(storage, _MEMORY, None)
                if known is not None:  # else no version was taken of it
                    setattr(storage, _MEMORY, replace(known, writes=known.writes + 1))
