"""The private names of torch that prefixkit uses: looked up in this file only, each with a fallback.

``missing`` lists the names that this version of torch lacks; a test fails if a new version lacks one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from importlib import import_module
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, UntypedStorage

missing: list[str] = []


def private(module: str, name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The function at a dotted ``name`` in a module of torch, or ``otherwise``; then ``missing`` notes the name."""
    try:
        return reduce(getattr, name.split("."), import_module(module))  # type: ignore[return-value]
    except (ImportError, AttributeError):
        missing.append(f"{module}.{name}")
        return otherwise


# -- asked at each kernel launch: the public functions take microseconds to check what is already known here -----------


def public_stream(device: int) -> int:
    """The address of the current stream of a device."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def public_capturing() -> bool:
    """Whether the current stream captures a graph."""
    return torch.cuda.is_current_stream_capturing()


raw_stream: Callable[[int], int] = private("torch", "_C._cuda_getCurrentRawStream", public_stream)
current_device: Callable[[], int] = private("torch", "_C._cuda_getDevice", torch.cuda.current_device)
stream_captures: Callable[[], bool] = private("torch", "_C._cuda_isCurrentStreamCapturing", public_capturing)


# -- memory ------------------------------------------------------------------------------------------------------------


def public_storage(begin: int, device: torch.device, size: int) -> UntypedStorage:
    """A storage over memory that another object holds, by the array interfaces of numpy and CUDA."""
    interface = {"data": (begin, False), "shape": (size,), "typestr": "|u1", "version": 3}
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface))).untyped_storage()
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device).untyped_storage()


storage_over: Callable[[int, torch.device, int], UntypedStorage] = private(
    "torch", "_C._construct_storage_from_data_pointer", public_storage
)
use_count: Callable[[int], int] = private("torch", "_C._storage_Use_Count", lambda storage: 0)


def _uses(tensor: Tensor) -> int:
    return use_count(tensor.untyped_storage()._cdata)


_NO_TENSORS = _uses(torch.empty(1, device="cpu")) - 1  # what asking adds to the count


def tensors_over(tensor: Tensor) -> int | None:
    """The number of tensors over this tensor's memory, itself included; None if torch does not tell."""
    count = _uses(tensor)
    return count - _NO_TENSORS if count else None


class SharedMemory(NamedTuple):
    """GPU memory that several processes read and write.

    Attributes:
        parts: For each process ``[size]`` uint8, in the order of ranks; zero at first.
        handle: The object that keeps the memory alive.
    """

    parts: list[Tensor]
    handle: Any


def shared_memory(size: int, device: torch.device, group: Any) -> SharedMemory | None:
    """``size`` bytes on the GPU of each process of a group, shared by all of them; None if torch cannot share memory.

    All processes call this; RuntimeError if their GPUs are not linked.
    """
    module = "torch.distributed._symmetric_memory"
    empty = private(module, "empty", lambda size, dtype, device: None)
    meet = private(module, "rendezvous", lambda tensor, group: None)
    own = empty(size, dtype=torch.uint8, device=device)
    if own is None or (met := meet(own.zero_(), group)) is None:
        return None
    return SharedMemory([met.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())], (own, met))


# -- the compiler: importing it takes a second, so its names are looked up at their use --------------------------------


def mark_dynamic(tensor: Tensor, dims: int | Sequence[int]) -> None:
    """Declare that sizes in these dimensions may change between calls of a traced function; else torch finds out."""
    private("torch._dynamo", "maybe_mark_dynamic", lambda tensor, dims: None)(tensor, dims)


def drop_compiled(code: CodeType) -> None:
    """Drop what was compiled for a function's code; without torch's private name for that, drop all compiled code."""
    private("torch", "_C._dynamo.eval_frame.reset_code", lambda code: torch.compiler.reset())(code)


def fake_mode_of(inputs: Sequence[Any]) -> Any:
    """The mode of the fake tensors among the inputs; None if there are none."""

    def of_tensors(inputs: Sequence[Any]) -> Any:
        return next((mode for one in inputs if (mode := getattr(one, "fake_mode", None)) is not None), None)

    return private("torch._guards", "detect_fake_mode", of_tensors)(inputs)


def without_memory() -> AbstractContextManager[Any]:
    """A context in which new tensors have shape, dtype and device, but no memory; the fallback is the meta device."""
    made: AbstractContextManager[Any] = private(
        "torch._subclasses.fake_tensor", "FakeTensorMode", lambda: torch.device("meta")
    )()
    return made


@contextmanager
def unlogged() -> Iterator[None]:
    """A context in which torch does not log that an operation has failed on tensors without memory."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def outside_modes() -> Iterator[None]:
    """A context in which no mode of the caller is active, such as fake tensors or a default device.

    Finalizers need it: the garbage collector may run them under any mode of the program.
    """
    modes = private("torch.utils._python_dispatch", "_disable_current_modes", nullcontext)
    functions = private("torch", "_C.DisableTorchFunction", nullcontext)
    with modes(), functions():
        yield


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Any:
    """A graph compiled by Inductor; the fallback is the graph itself, not compiled."""
    return private("torch._inductor.compile_fx", "compile_fx", lambda graph, inputs, config_patches: graph)(
        graph, inputs, config_patches=patches
    )


def compiler_errors() -> tuple[type[Exception], ...]:
    """The exceptions that the compiler raises if it cannot compile a function."""
    names = ("TorchDynamoException", "FailOnRecompileLimitHit")
    return tuple(private("torch._dynamo.exc", name, RuntimeError) for name in names)  # type: ignore[misc]
