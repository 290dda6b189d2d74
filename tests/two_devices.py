"""Two devices on a CPU: torch functions in this context treat ``cpu:1`` as a device with memory of its own.

Torch has one CPU, and drops the index of ``cpu:1``.  Here a tensor that is made on, or moved to, ``cpu:1`` says so as
its ``device``; a move copies, and a torch function of tensors on both devices is an error, as for two GPUs.  Ops of
prefixkit are functions of torch: what happens inside them runs on the CPU and is not checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode

import prefixkit.backends  # noqa: F401 - registers them
from prefixkit.models.weights import borrowed
from prefixkit.ops.backend import plain_torch, register
from prefixkit.torch_private import outside_modes, storage_over

FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 1)
# Functions that may have tensors on both devices: they copy, or concern the Python object alone.
_ANYWHERE = {Tensor.copy_, Tensor.data.__set__, Tensor.requires_grad_, Tensor.__deepcopy__}
_MOVES = {Tensor.to, Tensor.cpu, Tensor.type_as}


class TwoDevices(TorchFunctionMode):
    """The context.

    Attributes:
        moved: How many tensors with elements were copied to each device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = Counter[torch.device]()
        self._second: dict[int, UntypedStorage] = {}  # holds them, so that no other memory gets their address

    def __enter__(self) -> TwoDevices:
        self._borrows = mock.patch.object(borrowed, "storage_over", _storage_over)
        self._borrows.start()
        backend = self._backend = plain_torch()
        assert backend.expanded_attention is not None
        parts = {part: replace(of, attend=self._as_op(of.attend)) for part, of in backend.latent_parts.items()}
        wrapped = replace(backend, expanded_attention=self._as_op(backend.expanded_attention), latent_parts=parts)
        register(backend.name, lambda: wrapped)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        backend = self._backend
        register(backend.name, lambda: backend)
        self._borrows.stop()

    def _as_op(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the backend that is no function of torch, as if it were one."""

        def run(*args: Any, **kwargs: Any) -> Any:
            (target,) = {self.device_of(one) for one in _tensors((args, kwargs)) if one.numel() != 1}
            with outside_modes():
                made = function(*args, **kwargs)
            return self._placed(made, target, False)

        return run

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor lies."""
        return SECOND if tensor.untyped_storage()._cdata in self._second else FIRST

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return self.device_of(args[0]) if args[0].device == FIRST else args[0].device
        if func is torch.device:
            return func(*args, **kwargs)
        given = [one for one in _tensors((args, kwargs)) if one.device == FIRST]
        # The host's numbers, and handles of plans, go with tensors on any device.
        found = {self.device_of(one) for one in given if one.numel() != 1 or self.device_of(one) == SECOND}
        if func is Tensor.numpy and SECOND in found:
            raise TypeError("can't convert cpu:1 device type tensor to numpy; use Tensor.cpu() first")
        if len(found) > 1 and func not in _ANYWHERE and func not in _MOVES:
            raise RuntimeError(f"{_name(func)}: expected all tensors to be on one device, but found cpu and cpu:1")
        made = func(*map(_on_cpu, args), **{name: _on_cpu(one) for name, one in kwargs.items()})
        if func in _ANYWHERE:
            return made
        target = self._target(func, args, kwargs) or next(iter(found), FIRST)
        return self._placed(made, target, bool(given) and found != {target})

    def _target(self, func: Any, args: Any, kwargs: Any) -> torch.device | None:
        """The device that a call names."""
        if func is Tensor.cpu:
            return FIRST
        named = [kwargs.get("device"), kwargs.get("other")] + ([*args[1:3]] if func in _MOVES else [])
        for one in named:
            if isinstance(one, Tensor):
                return self.device_of(one)
            if isinstance(one, str | torch.device):
                device = torch.device(one)
                return SECOND if device == SECOND else FIRST if device.type == "cpu" else None
        return None

    def _placed(self, made: Any, target: torch.device, moves: bool) -> Any:
        if isinstance(made, list | tuple) and made and all(isinstance(one, Tensor) for one in made):
            parts = [self._placed(one, target, moves) for one in made]
            return type(made)(parts) if type(made) in (list, tuple) else made
        if not isinstance(made, Tensor) or made.device != FIRST or self.device_of(made) == target:
            return made
        if moves:
            made = made.clone()
            self.moved[target] += bool(made.numel())
        if target == SECOND:
            storage = made.untyped_storage()
            self._second[storage._cdata] = storage
        return made


def _storage_over(begin: int, device: torch.device, size: int) -> UntypedStorage:
    """Memory that is borrowed to compare it lies on the only device that torch has."""
    return storage_over(begin, FIRST, size)


def _on_cpu(value: Any) -> Any:
    """The device that torch has; torch would copy a tensor that is moved from ``cpu`` to ``cpu:0``."""
    is_cpu = isinstance(value, torch.device) and value.type == "cpu"
    return FIRST if is_cpu or (isinstance(value, str) and value in ("cpu:0", "cpu:1")) else value


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
