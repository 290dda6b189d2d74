"""Whether our kernels run on a GPU, and if not, why and what would help."""

from __future__ import annotations

import torch

from prefixkit.cuda import nvrtc
from prefixkit.cuda.jit import driver_cuda
from prefixkit.ops.backend import Choice


def probe(device: torch.device) -> Choice:
    """The default choice for a GPU: ``cuda``, or ``torch`` with the reason."""
    if torch.version.hip is not None:
        return Choice("torch", "the kernels are for NVIDIA GPUs, and this torch is built for AMD's")
    try:
        (major, minor), archs = nvrtc.nvrtc_version(), nvrtc.supported_archs()
    except nvrtc.NvrtcMissing as error:
        return Choice("torch", str(error.args[0]).partition("; ")[0], f"for the fast kernels: {nvrtc.REMEDY}")
    name = torch.cuda.get_device_name(device)
    try:
        arch = nvrtc.arch_for(torch.cuda.get_device_capability(device), archs)
    except nvrtc.UnsupportedArch as error:
        reason, _, remedy = str(error).partition("; ")
        return Choice("torch", f"{name}: {reason}", remedy)
    driver = driver_cuda()
    if major > driver[0]:
        reason = f"the driver serves CUDA {driver[0]}.{driver[1]}, and does not load what NVRTC {major}.{minor} makes"
        return Choice("torch", reason, f"update the driver, or pip install 'cuda-core[cu{driver[0]}]'")
    return Choice("cuda", f"{name}, kernels for {arch} by NVRTC {major}.{minor}")
