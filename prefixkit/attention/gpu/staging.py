"""Arrays that the host writes and a device reads, uploaded in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.tree.arrays import Ints

# Int32 elements before the first tensor: torch.compile specialises graphs on storage offsets 0 and 1, so a step's
# tensors must never have these offsets, or always.
_BEFORE = 4


class Staged:
    """Int32 arrays of fixed shapes on a device, and staging buffers for them in the host's pinned memory.

    Attributes:
        tensors: On the device, each beginning at a multiple of 16 bytes; zero at first.
        arrays: On the host; write them between :meth:`writable` and :meth:`upload`.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device | str) -> None:
        target = torch.device(device)
        size, parts = carved_size(shapes), [(shape, False) for shape in shapes]
        self._on_device = torch.zeros(size, dtype=torch.int32, device=target)
        self._on_host = torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=target.type == "cuda")
        self._uploaded = torch.cuda.Event() if target.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = carve(self._on_device, parts)
        self.arrays: list[Ints] = [view.numpy() for view in carve(self._on_host, parts)]

    def writable(self) -> list[Ints]:
        """Wait until the last upload has read the host's arrays, and return these."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        return self.arrays

    def enqueue_copy(self) -> None:
        """:meth:`upload` for a CUDA graph: the caller must not write the arrays again before a replay has run."""
        self._on_device.copy_(self._on_host, non_blocking=True)

    def upload(self) -> None:
        """Copy all arrays to the device, on its current stream."""
        self.enqueue_copy()
        if self._uploaded is not None:
            self._uploaded.record(torch.cuda.current_stream(self._on_device.device))


def upload(arrays: Sequence[NDArray[np.signedinteger]], device: torch.device) -> list[Tensor]:
    """Upload int32 and int64 arrays to a device, as parts of one tensor that begin at multiples of 16 bytes.

    To a GPU all arrays are uploaded in one copy on the current stream, from pinned memory that torch holds until the
    copy has run; the host does not wait.
    """
    counts = [array.nbytes // 4 for array in arrays]
    staged = torch.empty(
        _BEFORE + sum(counts) + 3 * len(counts), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
    )
    image, at = staged.numpy(), _BEFORE
    for array, count in zip(arrays, counts, strict=True):
        image[at : at + count].view(array.dtype)[:] = array.ravel()
        at += count + -count % 4
    return carve(staged.to(device, non_blocking=True), [(array.shape, array.dtype == np.int64) for array in arrays])


def carved_size(shapes: Sequence[tuple[int, ...]]) -> int:
    """Int32 elements that :func:`carve` needs for tensors of int32 of these shapes."""
    return _BEFORE + sum(-(-prod(shape) // 4) * 4 for shape in shapes)


def carve(flat: Tensor, parts: Sequence[tuple[tuple[int, ...], bool]]) -> list[Tensor]:
    """Tensors laid end to end in ``flat``, 16 bytes aligned; ``parts``: the shape of each, and whether it is int64."""
    of = flat, flat[: len(flat) // 2 * 2].view(torch.int64)
    carved, at = [], _BEFORE
    for shape, is_long in parts:
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        # A single call for each tensor, because a step waits for these calls.
        carved.append(torch.as_strided(of[is_long], shape, strides, at >> is_long))
        at += -(-(prod(shape) << is_long) // 4) * 4
    return carved
