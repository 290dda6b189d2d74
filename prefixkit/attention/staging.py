"""Arrays that the host writes and a device reads, brought there with one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.tree.snapshot import Ints


class Staged:
    """Int32 arrays of fixed shapes on a device, and their images in the host's pinned memory.

    Attributes:
        tensors: On the device, each beginning at a multiple of 16 bytes; zero at first.
        arrays: On the host, to be written between :meth:`begin` and :meth:`send`.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device | str) -> None:
        target = torch.device(device)
        sizes = [-(-prod(shape) // 4) * 4 for shape in shapes]
        self._there = torch.zeros(sum(sizes), dtype=torch.int32, device=target)
        self._here = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=target.type == "cuda")
        self._sent = torch.cuda.Event() if target.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = list(_views(self._there, shapes, sizes))
        self.arrays: list[Ints] = [view.numpy() for view in _views(self._here, shapes, sizes)]

    def begin(self) -> list[Ints]:
        """The host's arrays, once the last copy has left them."""
        if self._sent is not None:
            self._sent.synchronize()
        return self.arrays

    def send(self) -> None:
        """Copy all of them, on the device's current stream."""
        self._there.copy_(self._here, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._there.device))


def _views(flat: Tensor, shapes: Sequence[tuple[int, ...]], sizes: list[int]) -> Iterator[Tensor]:
    for shape, part in zip(shapes, torch.split(flat, sizes), strict=True):
        yield part[: prod(shape)].view(shape)


def upload(arrays: Sequence[NDArray[np.signedinteger]], device: torch.device) -> list[Tensor]:
    """Copies of int32 and int64 arrays on a device, parts of one tensor, each beginning at a multiple of 16 bytes.

    On a GPU all come in one copy on the current stream, out of pinned memory that torch keeps until it has left; the host does
    not wait.
    """
    whole = [array.nbytes // 4 for array in arrays]
    sizes = [part for size in whole for part in (size, -size % 4)]
    here = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    image, at = here.numpy(), 0
    for array, size in zip(arrays, whole, strict=True):
        image[at : at + size].view(array.dtype)[:] = array.ravel()
        at += size + -size % 4
    there = here.to(device, non_blocking=True)
    parts = torch.split(there, sizes)[::2]
    return [
        (part.view(torch.int64) if array.dtype == np.int64 else part).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]
