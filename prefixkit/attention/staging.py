"""Arrays that the host writes and a device reads, at addresses that stay: refilled with one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
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
