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
        states: The tensors that each module keeps for a sequence.
        tensors: For each module, the tensors that hold them.
        slots: How many sequences' states fit.
    """

    def __init__(self, states: States, device: torch.device) -> None:
        self.states, self.device, self.slots = states, device, 0
        self.tensors = self.made(0)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state in all modules."""
        return sum(tensor.bytes for module in self.states for tensor in module)

    @property
    def bytes(self) -> int:
        return self.slots * self.bytes_per_slot

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
                [torch.zeros((1 + slots, *one.shape), dtype=one.dtype, device=self.device) for one in module]
                for module in self.states
            ]

    def read(self, slots: NDArray[np.int64]) -> list[Tensor]:
        """Host copies of the states in slots: for each tensor in turn ``[slots, *shape]``."""
        at = torch.from_numpy(slots).to(self.device)
        return [tensor[at].cpu() for module in self.tensors for tensor in module]

    def read_one(self, number: int, slots: NDArray[np.int64]) -> Tensor:
        """The host copy of the tensor of this number alone, as :meth:`read` counts them."""
        every = [tensor for module in self.tensors for tensor in module]
        return every[number][torch.from_numpy(slots).to(self.device)].cpu()

    def write(self, slots: NDArray[np.int64], states: Sequence[Tensor]) -> None:
        """Write states that :meth:`read` returned to slots."""
        at = torch.from_numpy(slots).to(self.device)
        for tensor, values in zip([one for module in self.tensors for one in module], states, strict=True):
            tensor[at] = values.to(self.device)

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64], source_pool: StatePool) -> None:
        """Copy states from slots ``source`` of a pool with the same tensors to slots ``target`` of this one."""
        at, to = (torch.from_numpy(of).to(self.device) for of in (source, target))
        for mine, its in zip(self.tensors, source_pool.tensors, strict=True):
            for into, out in zip(mine, its, strict=True):
                into[to] = out[at]
