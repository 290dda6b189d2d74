"""Decisions that the processes of one model must make alike: under tensor parallelism all of them run each step.

A process that launched another batch than the others would wait for them for ever.  So the processes agree on every
value that depends on one process's memory or clock before they act on it, and take a step's results from process 0, or
each row's from the process that has sampled it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
SAME_CALLS = "make the same calls with the same arguments, in the same order, in each of them"


class ProcessesDiffer(ValueError):
    """Processes that share a model made different calls, or hold different stores."""


class Agreement(Protocol):
    """How the processes of one model agree: all of them call the same methods in the same order.

    Attributes:
        processes: The number of processes.
        rank: The number of this process, from 0.
    """

    processes: int
    rank: int

    def least(self, number: int) -> int:
        """The least of the numbers that the processes pass.  The host waits for the other processes."""

    def first(self, value: T) -> T:
        """The value that process 0 passes, which may be anything that can be pickled.  The host waits."""

    def check(self, what: str, value: Callable[[], object], remedy: str = SAME_CALLS) -> None:
        """Raise ProcessesDiffer in all processes unless their values are equal.  The host waits.

        Arrays, tensors and fields of dataclasses are compared by content, functions by name, and objects without a
        ``repr`` of their own by class.
        """

    def broadcast(self, *tensors: Tensor) -> None:
        """Overwrite the tensors with those of process 0, on the current stream; a CUDA graph can capture it.

        ``tensors``: dense tensors on one device, with the same shapes and dtypes in all processes.
        """

    def exchange(self, *tensors: Tensor) -> None:
        """Complete tensors whose rows the processes have written in equal parts, process r part r, likewise.

        ``tensors``: contiguous, ``[rows, ...]``, rows a multiple of ``processes``.
        """


class Alone:
    """The agreement of a process that has the model for itself."""

    processes, rank = 1, 0

    def least(self, number: int) -> int:
        return number

    def first(self, value: T) -> T:
        return value

    def check(self, what: str, value: Callable[[], object], remedy: str = "") -> None:
        """Does nothing: ``value`` is not called."""

    def broadcast(self, *tensors: Tensor) -> None:
        """Does nothing."""

    def exchange(self, *tensors: Tensor) -> None:
        """Does nothing."""


ALONE = Alone()


class Together:
    """The processes of a group of ``torch.distributed``.

    Args:
        group: A group for tensors on the model's device: of NCCL, or of gloo on CPUs.
        host: A group of the same processes that sends tensors in host memory.
    """

    def __init__(self, group: Any, host: Any) -> None:
        self._group, self._host = group, host
        self.processes, self.rank = group.size(), torch.distributed.get_rank(group)

    def least(self, number: int) -> int:
        found = torch.tensor(number, dtype=torch.int64)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, self._host)
        return int(found)

    def first(self, value: T) -> T:
        held = [value]
        torch.distributed.broadcast_object_list(held, group=self._host, group_src=0)
        return held[0]

    def check(self, what: str, value: Callable[[], object], remedy: str = SAME_CALLS) -> None:
        digest = hashlib.sha256()
        _say(value(), digest.update)
        number = int.from_bytes(digest.digest()[:8], "little", signed=True) >> 1  # 63 bits: -number is an int64 too
        found = torch.tensor([number, -number])
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, self._host)
        if found[0] != -found[1]:
            raise ProcessesDiffer(
                f"the {self.processes} processes that share the model have different {what}; {remedy}"
            )

    def broadcast(self, *tensors: Tensor) -> None:
        # One message, larger elements first: the offset of each part is then a multiple of its element size.
        ordered = sorted((one for one in tensors if one.numel()), key=lambda one: -one.itemsize)
        if not ordered:
            return
        group = self._group_for(ordered[0])
        with torch.inference_mode():  # allows writes to inference tensors and to others
            whole = torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in ordered])
            torch.distributed.broadcast(whole, group=group, group_src=0)
            for one, part in zip(ordered, torch.split(whole, [one.nbytes for one in ordered]), strict=True):
                one.copy_(part.view(one.dtype).view(one.shape))

    def exchange(self, *tensors: Tensor) -> None:
        # Named so since torch 2.13, where the older name warns.
        gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
        with torch.inference_mode():
            for one in tensors:
                own = one.chunk(self.processes)[self.rank].clone()
                gather(one, own, self._group_for(one))

    def _group_for(self, tensor: Tensor) -> Any:
        return self._host if tensor.device.type == "cpu" else self._group


def everywhere(agreement: Agreement, true: bool) -> bool:
    """Whether ``true`` holds in all processes."""
    return bool(agreement.least(int(true)))


def all_or_none(agreement: Agreement, failure: type[Exception], make: Callable[[], T]) -> T:
    """The result of ``make`` once it has returned in all processes; if it fails in one, all raise ``failure``."""
    made: T | None = None
    failed: Exception | None = None
    try:
        made = make()
    except failure as error:
        failed = error
    if everywhere(agreement, failed is None):
        return made  # type: ignore[return-value]
    try:
        raise failed or failure("another process of the model has no memory for what this one has made")
    finally:
        failed = None  # otherwise frame, error and traceback would be a reference cycle


def _say(value: object, update: Callable[[bytes], None]) -> None:
    """Add the content of a value to a digest."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        update(f"{value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif is_dataclass(value):
        _say([getattr(value, one.name) for one in fields(value)], update)
    elif isinstance(value, list | tuple):
        update(f"{len(value)} of".encode())
        for one in value:
            _say(one, update)
    elif isinstance(value, Mapping):
        _say([*value.items()], update)
    elif callable(value):
        update(getattr(value, "__qualname__", type(value).__qualname__).encode())
    elif type(value).__repr__ is object.__repr__:  # its text contains an address
        update(type(value).__qualname__.encode())
    else:
        update(f"{value!r};".encode())
