"""Whether our kernels run on a GPU, and if not, why and what would help."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefixkit.cuda import nvrtc
from prefixkit.cuda.jit import driver_cuda
from prefixkit.ops.backend import Choice


@dataclass(frozen=True)
class GpuFacts:
    """What decides.

    Attributes:
        name: The GPU's.
        capability: Its compute capability.
        hip: Whether torch is built for AMD's GPUs.
        nvrtc: The compiler's version, or why there is none.
        archs: Compute capabilities that it knows, as 90 for 9.0.
        driver: The CUDA version that the driver serves.
    """

    name: str
    capability: tuple[int, int]
    hip: bool
    nvrtc: tuple[int, int] | nvrtc.NvrtcMissing
    archs: tuple[int, ...]
    driver: tuple[int, int]


def read_facts(device: torch.device) -> GpuFacts:
    """The facts of a GPU."""
    index = torch.cuda.current_device() if device.index is None else device.index
    version: tuple[int, int] | nvrtc.NvrtcMissing
    archs: tuple[int, ...] = ()
    try:
        version, archs = nvrtc.nvrtc_version(), nvrtc.supported_archs()
    except nvrtc.NvrtcMissing as error:
        version = error
    return GpuFacts(
        name=torch.cuda.get_device_name(index),
        capability=torch.cuda.get_device_capability(index),
        hip=torch.version.hip is not None,
        nvrtc=version,
        archs=archs,
        driver=(0, 0) if isinstance(version, nvrtc.NvrtcMissing) else driver_cuda(),
    )


def probe(gpu: GpuFacts) -> Choice:
    """What runs the ops on a GPU if nothing else is asked for: ``cuda``, or ``torch`` and why."""
    if gpu.hip:
        return Choice("torch", "the kernels are for NVIDIA GPUs, and this torch is built for AMD's")
    if isinstance(gpu.nvrtc, nvrtc.NvrtcMissing):
        return Choice("torch", str(gpu.nvrtc.args[0]).partition("; ")[0], f"for the fast kernels: {nvrtc.REMEDY}")
    try:
        arch = nvrtc.arch_for(gpu.capability, gpu.archs)
    except nvrtc.UnsupportedArch as error:
        reason, _, remedy = str(error).partition("; ")
        return Choice("torch", f"{gpu.name}: {reason}", remedy)
    if gpu.nvrtc[0] > gpu.driver[0]:
        return Choice(
            "torch",
            f"the driver serves CUDA {gpu.driver[0]}.{gpu.driver[1]}, and does not load what NVRTC "
            f"{gpu.nvrtc[0]}.{gpu.nvrtc[1]} makes",
            f"update the driver, or pip install 'cuda-core[cu{gpu.driver[0]}]'",
        )
    return Choice("cuda", f"{gpu.name}, kernels for {arch} by NVRTC {gpu.nvrtc[0]}.{gpu.nvrtc[1]}")
