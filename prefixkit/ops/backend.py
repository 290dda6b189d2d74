"""Which code runs the ops on a GPU, found out once per device and said in one line.

    cuda    our kernels
    torch   plain torch on the GPU: cuda-core or NVRTC is missing, or the GPU is unknown to them
    cpu     the tensors are on the CPU

``PREFIXKIT_BACKEND`` chooses instead: ``cuda`` makes whatever is missing an error, ``torch`` does without the kernels.  Tensors
on the CPU always run on the CPU; ``cpu`` says that nothing else is wanted, so tensors on a GPU are an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from prefixkit.cuda import kernel_cache, nvrtc
from prefixkit.cuda.jit import driver_cuda

log = logging.getLogger("prefixkit")

NAMES = ("cuda", "torch", "cpu")
VARIABLE = "PREFIXKIT_BACKEND"


class BackendError(ValueError):
    """The backend that ``PREFIXKIT_BACKEND`` asks for cannot run here, or there is none of that name."""


@dataclass(frozen=True)
class Backend:
    """What runs, why, and what to do to get the kernels ("" if they run, or cannot)."""

    name: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Ops:
    """The implementations of a backend."""

    kv_append: Callable[..., None]
    rotary_append: Callable[..., Any]
    tree_attention: Callable[..., Any]


def wanted() -> str | None:
    """What ``PREFIXKIT_BACKEND`` says, or None.

    Raises:
        BackendError: no such backend.
    """
    name = os.environ.get(VARIABLE, "").strip().lower()
    if name and name not in NAMES:
        raise BackendError(
            f"{VARIABLE} must be one of {', '.join(NAMES)}, or unset for the best there is; got {name!r}"
        )
    return name or None


def probe(device: torch.device | int) -> Backend:
    """What would run the ops on a GPU if nobody chose: ``cuda``, or ``torch`` and why."""
    index = torch.device("cuda", device).index if isinstance(device, int) else _index(device)
    if torch.version.hip is not None:
        return Backend("torch", "the kernels are for NVIDIA GPUs, and this torch is built for AMD's")
    try:
        version = nvrtc.nvrtc_version()
    except nvrtc.NvrtcMissing as error:
        return Backend("torch", str(error.args[0]).partition("; ")[0], f"for the fast kernels: {nvrtc.REMEDY}")
    name = torch.cuda.get_device_name(index)
    try:
        arch = nvrtc.arch_for(torch.cuda.get_device_capability(index), nvrtc.supported_archs())
    except nvrtc.UnsupportedArch as error:
        reason, _, remedy = str(error).partition("; ")
        return Backend("torch", f"{name}: {reason}", remedy)
    driver = driver_cuda()
    if version[0] > driver[0]:
        return Backend(
            "torch",
            f"the driver serves CUDA {driver[0]}.{driver[1]}, and does not load what NVRTC {version[0]}.{version[1]} makes",
            f"update the driver, or pip install 'cuda-core[cu{driver[0]}]'",
        )
    return Backend("cuda", f"{name}, kernels for {arch} by NVRTC {version[0]}.{version[1]}")


def choose(device: torch.device) -> Backend:
    """What runs the ops for tensors on a device.

    Raises:
        BackendError: it cannot be what ``PREFIXKIT_BACKEND`` says.
    """
    name = wanted()
    if device.type == "cpu":
        return Backend("cpu", "the tensors are on the CPU")
    if device.type != "cuda":
        raise BackendError(f"prefixkit runs on CPUs and CUDA devices, not on {device}")
    if name == "cpu":
        raise BackendError(
            f"{VARIABLE}=cpu, but the tensors are on {device}; move the model to the CPU, or unset {VARIABLE}"
        )
    if name == "torch":
        return Backend("torch", f"{VARIABLE}=torch", f"unset {VARIABLE} for the fast kernels")
    found = probe(device)
    if name == "cuda" and found.name != "cuda":
        raise BackendError(f"{VARIABLE}=cuda, but the kernels cannot run: {found.reason}; {found.remedy}")
    return found


def best() -> Backend:
    """What would run on the best device here; for ``prefixkit env``.

    Raises:
        BackendError: it cannot be what ``PREFIXKIT_BACKEND`` says.
    """
    name = wanted()
    if torch.cuda.is_available():
        return Backend("cpu", f"{VARIABLE}=cpu") if name == "cpu" else choose(torch.device("cuda", 0))
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    if name in ("cuda", "torch"):
        raise BackendError(f"{VARIABLE}={name}, but torch sees no CUDA device (it {built}); unset {VARIABLE}")
    return Backend("cpu", f"torch sees no CUDA device (it {built})")


@cache
def ops_for(device: torch.device) -> Ops:
    """The implementations for a GPU; the first call says in the log which, and why.

    Raises:
        BackendError: see :func:`choose`.
    """
    found = choose(torch.device("cuda", _index(device)))
    (log.info if found.name == "cuda" else log.warning)("attention on %s runs on %s", device, found)
    if found.name == "cuda":
        from prefixkit.backends.cuda import append as cuda_ops
        from prefixkit.backends.cuda import attention as cuda_attention
        from prefixkit.backends.cuda import rotary as cuda_rotary

        return Ops(
            cuda_ops.kv_append,
            cuda_rotary.rotary_append,
            cuda_attention.tree_attention,
        )
    from prefixkit.backends.torch import gpu as torch_backend

    return Ops(
        torch_backend.kv_append,
        torch_backend.rotary_append,
        torch_backend.tree_attention,
    )


def _index(device: torch.device) -> int:
    # A CPU tensor among tensors on a GPU: the op's own check names it.
    return torch.cuda.current_device() if device.type != "cuda" or device.index is None else device.index


def facts() -> list[tuple[str, str]]:
    """``(what, value)`` pairs about GPUs, driver, NVRTC and backend, for ``prefixkit env``."""
    rows = [("GPU", "none")]
    if torch.cuda.is_available():
        rows = [(f"GPU {index}", _gpu(index)) for index in range(torch.cuda.device_count())]
        rows.append(("driver", f"{_driver_release()}serves CUDA {'.'.join(map(str, driver_cuda()))}"))
    try:
        compiler = ".".join(map(str, nvrtc.nvrtc_version()))
    except nvrtc.NvrtcMissing as error:
        compiler = str(error)
    try:
        backend = str(best())
    except BackendError as error:
        backend = f"none: {error}"
    kept = kernel_cache.folder()
    entries = list(kept.glob("*.bin")) if kept.is_dir() else []
    size = sum(entry.stat().st_size for entry in entries) / 2**20
    return [
        *rows,
        ("NVRTC", compiler),
        ("backend", backend),
        ("kernels", f"{len(entries)} compiled, {size:.1f} MiB in {kept}"),
    ]


def _gpu(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    memory = found.total_memory / 2**30
    return (
        f"{found.name}, compute capability {found.major}.{found.minor}, {found.multi_processor_count} SMs, "
        f"{memory:.0f} GiB (torch for CUDA {torch.version.cuda})"
    )


def _driver_release() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return ""
    numbers = [word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()]
    return f"{numbers[0]}, " if numbers else ""
