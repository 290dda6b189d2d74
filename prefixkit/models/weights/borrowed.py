"""The memory of weights: tensors over memory that others own, and writes that torch's version counters miss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from prefixkit.threads import EventCount, once
from prefixkit.torch_private import storage_over

WITH_MEMORY = frozenset({Tensor, nn.Parameter})  # classes whose tensors do not consist of others


def borrowed(
    begin: int, device: torch.device, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """A tensor over memory that others own: contiguous rows from an address on, valid while they own the memory."""
    size = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
    memory = storage_over(begin, device, size)
    return torch.empty(0, dtype=dtype, device=device).set_(memory, 0, tuple(shape), tuple(stride))


def optimizer_steps() -> int:
    """Steps of all optimizers since the first call of this function, counted by torch's hook.

    Fused optimizers write to parameters and leave torch's version counters as they are.
    """
    return _steps().count


@once
def _steps() -> EventCount:
    steps = EventCount()

    def count(*_: object) -> None:
        steps.add()

    register_optimizer_step_post_hook(count)
    return steps


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory that a tensor consists of: itself, or the inner ones of a quantised or sharded weight."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    inner = [getattr(tensor, name) for name in flatten()[0]]  # a sharded weight's mesh may be among them
    return [part for one in inner if isinstance(one, Tensor) for part in parts_of(one)]
