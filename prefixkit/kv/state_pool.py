"""The tensors that hold states by slot, for layers that keep a state in place of KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state that a module keeps for a sequence.

    Attributes:
        recurrent: Whether transformers caches it as a recurrent state; else it does so as a convolution state.
        index: Its index among the states of its layer, as transformers counts them.
        shape: Its shape for one sequence.
        dtype: Its dtype.
    """

    recurrent: bool
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes for one sequence."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        kind = "recurrent" if self.recurrent else "convolution"
        return f"{kind} {' x '.join(map(str, self.shape))} {self.dtype}"


# For each module that keeps a state, its tensors.
States = tuple[tuple[StateTensor, ...], ...]


class StatePool:
    """``[1 + slots, *shape]`` of each tensor of each module that keeps a state; slot 0 is for padding rows.

    Attributes:
        states, devices: The tensors that each module keeps for a sequence, and where.
        tensors: For each module, the tensors that hold them.
        slots: How many sequences' states fit.
    """

    def __init__(self, states: States, devices: Sequence[torch.device]) -> None:
        self.states, self.devices, self.slots = states, devices, 0
        self.tensors = self.made(0)

    @property
    def bytes(self) -> int:
        return self.slots * sum(tensor.bytes for module in self.states for tensor in module)

    def grow(self, slots: int, larger: list[list[Tensor]] | None = None) -> None:
        """Grow to ``slots`` states, in tensors that :meth:`made` returned or makes now; existing states are copied to
        them.
        """
        larger = self.made(slots) if larger is None else larger
        for mine, its in zip(self.tensors, larger, strict=True):
            for before, after in zip(mine, its, strict=True):
                after[: 1 + self.slots] = before
        self.tensors, self.slots = larger, slots

    def made(self, slots: int) -> list[list[Tensor]]:
        """New tensors for ``slots`` states."""
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside it
            return [
                [torch.zeros((1 + slots, *one.shape), dtype=one.dtype, device=device) for one in module]
                for module, device in zip(self.states, self.devices, strict=True)
            ]

    def read(self, slots: NDArray[np.int64]) -> list[Tensor]:
        """Host copies of the states in slots: for each tensor in turn ``[slots, *shape]``."""
        at = self._on_devices(slots)
        return [tensor[at[tensor.device]].cpu() for module in self.tensors for tensor in module]

    def read_one(self, number: int, slots: NDArray[np.int64]) -> Tensor:
        """The host copy of the tensor of this number alone, as :meth:`read` counts them."""
        tensor = [tensor for module in self.tensors for tensor in module][number]
        return tensor[torch.from_numpy(slots).to(tensor.device)].cpu()

    def write(self, slots: NDArray[np.int64], states: Sequence[Tensor]) -> None:
        """Write states that :meth:`read` returned to slots."""
        at = self._on_devices(slots)
        for tensor, values in zip([one for module in self.tensors for one in module], states, strict=True):
            tensor[at[tensor.device]] = values.to(tensor.device)

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64], source_pool: StatePool) -> None:
        """Copy states from slots ``source`` of a pool with the same tensors to slots ``target`` of this one."""
        at, to = self._on_devices(source), self._on_devices(target)
        for mine, its in zip(self.tensors, source_pool.tensors, strict=True):
            for into, out in zip(mine, its, strict=True):
                into[to[into.device]] = out[at[into.device]]

    def _on_devices(self, slots: NDArray[np.int64]) -> dict[torch.device, Tensor]:
        """The slots on each device that has states."""
        devices = {tensor.device: None for module in self.tensors for tensor in module}
        return {device: torch.from_numpy(slots).to(device) for device in devices}
