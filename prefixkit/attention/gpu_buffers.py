"""Plans in tensors of fixed size and place, so that a captured CUDA graph survives a new plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.gpu_plan import GpuPlan


class PlanTooLarge(ValueError):
    """A plan does not fit the buffers made for it."""


@dataclass(frozen=True)
class PlanCapacity:
    """How much a plan may hold.

    Attributes:
        wide, narrow: Items.
        segments: Segments of all items.
        rows: Query rows.
        partials: Partial rows; the op keeps ``partials * heads * (head_dim + 1)`` floats for them.
    """

    wide: int
    narrow: int
    segments: int
    rows: int
    partials: int

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the six arrays, in the order of :meth:`GpuPlan.arrays`; none is empty, so that all have an address."""
        wide, narrow, segments, partials = (max(n, 1) for n in (self.wide, self.narrow, self.segments, self.partials))
        return (8,), (wide, 8), (narrow, 8), (segments, 3), (self.rows + 1,), (partials,)

    def check(self, need: PlanCapacity, what: str = "the plan") -> None:
        """Raise PlanTooLarge, naming all that ``need`` has more of."""
        short = [
            f"{getattr(need, field.name)} {field.name} (room for {getattr(self, field.name)})"
            for field in fields(self)
            if getattr(need, field.name) > getattr(self, field.name)
        ]
        if short:
            raise PlanTooLarge(f"{what} needs {', '.join(short)}; make larger buffers, and capture graphs anew")


def size_of(plan: GpuPlan) -> PlanCapacity:
    """What this plan needs."""
    return PlanCapacity(len(plan.wide), len(plan.narrow), len(plan.segments), plan.num_rows, plan.num_partial_rows)


class GpuPlanBuffers:
    """The six arrays of a plan on a device, at addresses that stay.

    Attributes:
        capacity: What they hold at most.
        work: The tensors, as ``tree_attention`` takes them; ``counts`` says how much of each is in use.
    """

    def __init__(self, capacity: PlanCapacity, device: torch.device | str) -> None:
        self.capacity = capacity
        target = torch.device(device)
        sizes = [-(-int(np.prod(shape)) // 4) * 4 for shape in capacity.shapes()]  # items are read 16 bytes at a time
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=target)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=target.type == "cuda")
        self.work: list[Tensor] = list(self._views(self._device, sizes))
        self._staged = [view.numpy() for view in self._views(self._host, sizes)]
        self._copied = torch.cuda.Event() if target.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _views(self, flat: Tensor, sizes: list[int]) -> Iterator[Tensor]:
        for shape, part in zip(self.capacity.shapes(), torch.split(flat, sizes), strict=True):
            yield part[: int(np.prod(shape))].view(shape)

    def fill(self, plan: GpuPlan) -> list[Tensor]:
        """Put a plan in place of the last one: one copy on the current stream, for which the host does not wait.

        Raises:
            PlanTooLarge: it does not fit; the last plan stays.
        """
        self.capacity.check(size_of(plan))
        if self._copied is not None:
            self._copied.synchronize()  # the last plan has left the staging buffer
        for staged, array in zip(self._staged, plan.arrays(), strict=True):
            staged[: len(array)] = array
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return self.work
