"""Whether a model's step waits for the GPU, which no CUDA graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prefixkit.runners.graph_arrays import CannotCapture

_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
_INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
# Tags of ops whose result, or its shape, the host must read.
_SEEN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class RefuseWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises CannotCapture if an op makes the host wait for a GPU: a capture would fail too, but less cleanly.

    Mixtures of experts wait if their layers read which experts have tokens, and rotary embeddings if they read the
    longest position.  The mode watches only the thread that enters it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if waits(func, args, kwargs):
            raise CannotCapture(f"the model waits for the GPU in each step, which no CUDA graph can hold: {func}")
        return func(*args, **kwargs)


def waits(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host waits for a device in this call of an op."""
    devices = {one.device.type for one in _tensors([*args, *kwargs.values()])}
    if func in _COPIES:
        devices.add(torch.device(kwargs.get("device") or args[0].device).type)
        waited_for = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return waited_for and len(devices) > 1
    if devices <= {"cpu"}:
        return False
    if func in _INDEXED:  # by a mask, whose True elements the host must count, or by indices
        indices = [*_tensors(args[1])]
        masked = any(one.dtype in (torch.bool, torch.uint8) for one in indices)
        return masked and not (len(indices) == 1 and _fills(args))
    return any(tag in _SEEN for tag in getattr(func, "tags", ()))


def _fills(args: tuple[Any, ...]) -> bool:
    """Whether an op writes one number where a mask is True, as ``x[mask] = 0.0`` in the embedding of a vocabulary that
    is split over processes: torch then does not count the True elements.
    """
    value, adds = args[2] if len(args) > 2 else None, args[3] if len(args) > 3 else False
    return isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" and not adds


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
