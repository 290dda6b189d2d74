"""Counters in a GPU's memory, by which all blocks of a launch wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
from torch import Tensor

from prefixkit.cuda.launch import CudaError

_BLOCK = 4096  # counters that are allocated together
# Counters left for graphs after each eager call: at most this many graphs may be captured before the next one.
_SPARE = 2048


class BarrierCounters:
    """The counters of one GPU: cumulative, and zero at first.  Captured graphs contain their addresses."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._blocks: list[Tensor] = []
        self._numbers: dict[Hashable, int] = {}

    def address(self, owner: Hashable, capturing: bool) -> int:
        """Address of the counter of a stream, or of a graph that is being captured; its launches run in order.

        Raises:
            CudaError: a graph is captured, and no counter is left.
        """
        with self._lock:
            number, most = self._numbers.get(owner, len(self._numbers)), _BLOCK * len(self._blocks)
            if capturing and number >= most:
                raise CudaError(
                    "tree_attention: call it once before capturing it in a CUDA graph, so that it can set up memory"
                )
            self._numbers[owner] = number
            if not capturing and len(self._numbers) > most - _SPARE:  # a captured call cannot allocate
                block = torch.zeros(_BLOCK, dtype=torch.int32, device=self._device)
                torch.cuda.synchronize(self._device)  # other streams may use it next
                self._blocks.append(block)
            return self._blocks[number // _BLOCK].data_ptr() + 4 * (number % _BLOCK)
