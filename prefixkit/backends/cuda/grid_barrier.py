"""Counters in the memory of a GPU by which all blocks of a launch wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
from torch import Tensor

from prefixkit.cuda.launch import CudaError

_BLOCK = 4096  # counters that are allocated together
# Left for graphs whenever something runs without one: at most this many may be captured in between.
_SPARE = 2048


class BarrierCounters:
    """The counters of one GPU: each stream has one, and each captured graph, whose launches run in order.

    They are zero at first, and cumulative.  They stay as long as this object: captured graphs hold their addresses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._blocks: list[Tensor] = []
        self._numbers: dict[Hashable, int] = {}

    def address(self, owner: Hashable, capturing: bool) -> int:
        """Address of a counter that no other owner has.

        Args:
            owner: The stream, or the graph that is being captured.
            capturing: Nothing can be allocated now.

        Raises:
            CudaError: a graph is captured, and no counter is left.
        """
        number = self._numbers.get(owner)
        if number is None or not (capturing or self._has_spare()):
            with self._lock:
                number = self._take(owner, capturing)
        return self._blocks[number // _BLOCK].data_ptr() + 4 * (number % _BLOCK)

    def _take(self, owner: Hashable, capturing: bool) -> int:
        number = self._numbers.get(owner, len(self._numbers))
        if capturing and number >= _BLOCK * len(self._blocks):
            raise CudaError(
                "tree_attention: call it once before capturing it in a CUDA graph, so that it can set up memory"
            )
        self._numbers[owner] = number
        if not capturing and not self._has_spare():  # graphs to come cannot allocate
            block = torch.zeros(_BLOCK, dtype=torch.int32, device=self._device)
            torch.cuda.synchronize(self._device)  # other streams may use it next
            self._blocks.append(block)
        return number

    def _has_spare(self) -> bool:
        return len(self._numbers) <= _BLOCK * len(self._blocks) - _SPARE
