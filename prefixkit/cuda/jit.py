"""Load the kernels of a translation unit: from memory, else from the cache on disk, else compiled by NVRTC."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from prefixkit.cuda import kernel_cache
from prefixkit.cuda.nvrtc import Binary, Unit, arch_for, compile_unit, nvrtc_version, supported_archs
from prefixkit.threads import once

log = logging.getLogger("prefixkit")


class LoadError(RuntimeError):
    """The driver did not load machine code."""


def arch_of(device: int | torch.device | None) -> str:
    """The target of a GPU's kernels.

    Raises:
        NvrtcMissing: nothing can be compiled.
        UnsupportedArch: no kernels are compiled for this GPU.
    """
    return arch_for(torch.cuda.get_device_capability(device), supported_archs())


@dataclass(eq=False)
class Function:
    """A kernel on one device; launches change :attr:`allowed_shared` alone."""

    name: str  # the C++ name expression
    handle: int  # CUfunction
    device: int
    parameter_bytes: int  # size of its parameter, a struct
    max_shared: int  # bytes of dynamic shared memory that a block can have
    owners: Any  # objects that must live as long as the handle
    allowed_shared: int = 48 * 1024  # bytes of dynamic shared memory that a launch may ask for so far


@cache
def binary(unit: Unit, arch: str) -> Binary:
    """Machine code of a unit for a target such as ``"sm_90a"``: from memory, the disk, or NVRTC (logged).

    Raises:
        NvrtcMissing, CompileError: see ``compile_unit``.
    """
    path = kernel_cache.entry(unit, arch, nvrtc_version())
    cached = kernel_cache.read(path)
    if cached is not None:
        return cached
    with kernel_cache.making(path):
        cached = kernel_cache.read(path) if path.exists() else None  # another process may have been first
        if cached is None:
            what = "compiling the CUDA kernels of %s for %s, some seconds, once on this machine (%s)"
            log.warning(what, unit.file, arch, path.parent)
            began = time.perf_counter()
            cached = compile_unit(unit, arch)
            log.info("compiled %s in %.1f s", unit, time.perf_counter() - began)
            kernel_cache.write(path, cached)
    return cached


@once
def load(unit: Unit, device: int) -> dict[str, Function]:
    """A unit's kernels on a device, by name expression, compiled or read at most once per process.

    Safe while a CUDA graph is being captured.

    Raises:
        NvrtcMissing, CompileError: the machine code cannot be made.
        UnsupportedArch: no kernels are compiled for this GPU.
        LoadError: the driver does not load the machine code.
    """
    arch = arch_of(device)
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)
        return _load(binary(unit, arch), arch, device)


def _load(made: Binary, arch: str, device: int) -> dict[str, Function]:
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        # cuda-core makes and expects bytes here, although its type annotations say str.
        symbols: Any = {name: symbol.encode() for name, symbol in made.symbols.items()}
        code = ObjectCode.from_cubin(made.cubin, symbol_mapping=symbols)
        return {name: _function(code, name, device) for name in made.symbols}
    except Exception as error:
        raise LoadError(
            f"the driver (CUDA {'.'.join(map(str, driver_cuda()))}) does not load kernels made by NVRTC "
            f"{'.'.join(map(str, nvrtc_version()))} for {arch}: {error}"
        ) from error
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def _function(code: Any, name: str, device: int) -> Function:
    from cuda.bindings import driver

    kernel = code.get_kernel(name)
    # With lazy loading the code would reach the GPU at the first launch, which may be inside a graph capture.
    error, function = driver.cuKernelGetFunction(driver.CUkernel(int(kernel.handle)))
    if int(error):
        raise LoadError(f"cuKernelGetFunction({name}): {error.name}")
    shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    static = driver.cuFuncGetAttribute(shared, function)[1]
    most = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return Function(
        name=name,
        handle=int(function),
        device=device,
        parameter_bytes=int(driver.cuFuncGetParamInfo(function, 0)[2]),
        max_shared=int(driver.cuDeviceGetAttribute(most, driver.CUdevice(device))[1]) - int(static),
        owners=(code, kernel),
    )


@cache
def driver_cuda() -> tuple[int, int]:
    """The newest CUDA version that the driver supports; asked without cuda-core, which may be missing."""
    version = ctypes.c_int(0)
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    status = library.cuDriverGetVersion(ctypes.byref(version))
    assert status == 0, f"cuDriverGetVersion: {status}"
    return version.value // 1000, version.value % 1000 // 10
