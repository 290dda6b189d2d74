"""The tensors that hold the states of layers that keep one in place of KV, by slot."""

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
    """One tensor of the state that a module keeps of a sequence.

    Attributes:
        recurrent: Whether transformers caches it as a recurrent state, else as that of a convolution.
        index: Which of the states of its layer it is, as transformers counts them.
        shape: Of one sequence.
        dtype: Of its elements.
    """

    recurrent: bool
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of one sequence."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        kind = "recurrent" if self.recurrent else "convolution"
        return f"{kind} {' x '.join(map(str, self.shape))} {self.dtype}"


# Of each module that keeps a state, its tensors.
States = tuple[tuple[StateTensor, ...], ...]


class StatePool:
    """``[1 + slots, *shape]`` of each tensor of each module that keeps a state; slot 0 is for rows that are none.

    Attributes:
        states: What they are.
        tensors: Of each module, its tensors.
        slots: How many states of a sequence there is memory for.
    """

    def __init__(self, states: States, device: torch.device) -> None:
        self.states, self.device, self.slots = states, device, 0
        self.tensors = self.made(0)

    @property
    def bytes_per_slot(self) -> int:
        """The states of all modules after a token of one sequence."""
        return sum(tensor.bytes for module in self.states for tensor in module)

    @property
    def bytes(self) -> int:
        return self.slots * self.bytes_per_slot

    def grow(self, slots: int, larger: list[list[Tensor]] | None = None) -> None:
        """Have ``slots`` of them, in tensors that :meth:`made` gave or makes now; those that there are stay as they
        are.
        """
        larger = self.made(slots) if larger is None else larger
        for mine, its in zip(self.tensors, larger, strict=True):
            for before, after in zip(mine, its, strict=True):
                after[: 1 + self.slots] = before
        self.tensors, self.slots = larger, slots

    def made(self, slots: int) -> list[list[Tensor]]:
        """New tensors for ``slots`` states."""
        with torch.inference_mode(False):  # a tensor born in inference mode could not be written outside it
            return [
                [torch.zeros((1 + slots, *one.shape), dtype=one.dtype, device=self.device) for one in module]
                for module in self.states
            ]

    def read(self, slots: NDArray[np.int64]) -> list[Tensor]:
        """Copies of the states in slots in host memory, ``[slots, *shape]`` of each tensor in turn."""
        at = torch.from_numpy(slots).to(self.device)
        return [tensor[at].cpu() for module in self.tensors for tensor in module]

    def read_one(self, number: int, slots: NDArray[np.int64]) -> Tensor:
        """Of these copies the one of this number."""
        every = [tensor for module in self.tensors for tensor in module]
        return every[number][torch.from_numpy(slots).to(self.device)].cpu()

    def write(self, slots: NDArray[np.int64], states: Sequence[Tensor]) -> None:
        """Set the states in slots to what :meth:`read` gave."""
        at = torch.from_numpy(slots).to(self.device)
        for tensor, values in zip([one for module in self.tensors for one in module], states, strict=True):
            tensor[at] = values.to(self.device)

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64], source_pool: StatePool) -> None:
        """Copy states in slots ``source`` of a pool of the same states to slots ``target``."""
        at, to = (torch.from_numpy(of).to(self.device) for of in (source, target))
        for mine, its in zip(self.tensors, source_pool.tensors, strict=True):
            for into, out in zip(mine, its, strict=True):
                into[to] = out[at]
