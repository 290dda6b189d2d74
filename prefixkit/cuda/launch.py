"""Launching kernels: on torch's current stream, without allocating or waiting, so that a CUDA graph can capture it.

Every kernel takes one struct by value.  It is packed into a static buffer of each thread, so a launch is one
``pack_into`` and one driver call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TypeVar

import torch
from cuda.bindings import driver  # imported only where cuda-core is

from prefixkit.checking import checked
from prefixkit.cuda.jit import Function
from prefixkit.cuda.struct_layout import Struct
from prefixkit.torch_private import current_device, raw_stream

_T = TypeVar("_T")

# Larger than any struct of ours; the driver takes up to 4 KB.
STRUCT_BYTES = 4096


class CudaError(RuntimeError):
    """A launch failed, or in checked mode its kernel; the message names the op, the shapes and the plan."""


def signature_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Everything about a tensor except its data: what a cached launch depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class LaunchCache(dict[Hashable, _T]):
    """Prepared launches by the signature of their arguments; emptied when full, because prefills have many lengths."""

    SIZE = 4096

    def store(self, signature: Hashable, prepared: _T) -> _T:
        """Store ``prepared``, and return it."""
        if len(self) >= self.SIZE:
            self.clear()
        self[signature] = prepared
        return prepared


class _Buffer(threading.local):
    """Each thread's copy of a launch's arguments; the driver reads them before a launch returns."""

    def __init__(self) -> None:
        self.bytes = bytearray(STRUCT_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.pointers = (ctypes.c_void_p * 1)(address)
        self.address = ctypes.addressof(self.pointers)
        self.devices: set[int] = set()


_buffer = _Buffer()
_allowing = threading.Lock()


def launch(
    function: Function,
    layout: Struct,
    values: tuple[int | float | bytes, ...],
    grid: tuple[int, int, int],
    block: int,
    shared: int = 0,
    describe: Callable[[], str] = str,
    cooperative: bool = False,
    pdl: bool = False,
    cluster: int = 1,
) -> None:
    """Start a kernel on the current stream of its device.

    Args:
        function: The kernel.
        layout, values: The struct of its parameter, and the values of the fields.
        grid, block: The grid of blocks, and the threads of a block.
        shared: Bytes of dynamic shared memory per block.
        describe: Describes the call in an error message.
        cooperative: A cooperative launch: all blocks are on the GPU at once, because they wait for each other.
        pdl: Programmatic dependent launch: the kernel itself waits for the previous one in the stream
            (``griddepcontrol.wait``), so it may start before that one has ended.  Compute capability 9.0 and later.
        cluster: The number of consecutive blocks in a thread block cluster, up to 8.  Compute capability 9.0 and later.

    Raises:
        CudaError: the launch fails, or in checked mode the kernel.
    """
    if not (grid[0] and grid[1] and grid[2]):
        return
    device = function.device
    if device not in _buffer.devices:
        # A thread's first call binds the device's context to it.
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)
        _buffer.devices.add(device)
    if current_device() != device:
        with torch.cuda.device(device):
            return launch(function, layout, values, grid, block, shared, describe, cooperative, pdl, cluster)
    if shared > function.allowed_shared:
        _allow_shared(function, shared, describe)
    layout.packer.pack_into(_buffer.bytes, 0, *values)
    stream = raw_stream(device)
    if cooperative or pdl or cluster > 1:
        config = _config(grid, block, shared, stream, cooperative, pdl, cluster)
        (status,) = driver.cuLaunchKernelEx(config, function.handle, _buffer.address, 0)
    else:
        (status,) = driver.cuLaunchKernel(function.handle, *grid, block, 1, 1, shared, stream, _buffer.address, 0)
    if int(status):
        fail(int(status), f"launch of {function.name}, grid {grid}, {block} threads, {shared} B shared", describe)
    if checked() and not torch.cuda.is_current_stream_capturing():
        try:
            torch.cuda.synchronize(device)
        except Exception as error:  # of torch's own types; the kernel caused it in any case
            raise CudaError(f"{function.name} failed: {error}; {describe()}") from error


@lru_cache(maxsize=256)
def _config(
    grid: tuple[int, int, int], block: int, shared: int, stream: int, cooperative: bool, pdl: bool, cluster: int = 1
) -> driver.CUlaunchConfig:
    ids, attributes = driver.CUlaunchAttributeID, []

    def value(attribute: driver.CUlaunchAttributeID) -> driver.CUlaunchAttributeValue:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = attribute
        return attributes[-1].value

    if cooperative:
        # Two kernels whose blocks wait could each hold half of the GPU for ever; the driver starts all blocks or none.
        value(ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1
    if pdl:
        value(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).programmaticStreamSerializationAllowed = 1
    if cluster > 1:
        dimension = value(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim
        dimension.x, dimension.y, dimension.z = cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes, config.hStream = shared, stream
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _allow_shared(function: Function, shared: int, describe: Callable[[], str]) -> None:
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    with _allowing:  # another thread may set a larger limit
        if shared <= function.allowed_shared:
            return
        (status,) = driver.cuFuncSetAttribute(driver.CUfunction(function.handle), attribute, shared)
        if int(status):
            fail(int(status), f"{function.name} with {shared} B of shared memory", describe)
        function.allowed_shared = shared


def fail(status: int, what: str, describe: Callable[[], str] = str) -> None:
    """Raise CudaError with the name of a driver error and the call that failed."""
    error = driver.CUresult(status)
    text = driver.cuGetErrorString(error)[1]
    reason = text.decode() if isinstance(text, bytes) else str(text)
    raise CudaError(f"{what}: {error.name} ({reason}); {describe()}")
