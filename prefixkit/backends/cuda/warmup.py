"""Compile ahead, so that no run waits for the compiler: for images, and for clusters that share a cache folder.

And measure costs, so that plans are made for the GPU at hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from prefixkit.backends.cuda.costs.cost_cache import measured_cost
from prefixkit.backends.cuda.kernels import compiled_ahead, kernel_for
from prefixkit.cuda import jit, kernel_cache
from prefixkit.cuda.nvrtc import Unit, arch_for, nvrtc_version, supported_archs


@dataclass(frozen=True)
class Compiled:
    """A unit that is in the cache now; ``seconds`` of compilation, or None if it was cached before."""

    unit: Unit
    arch: str
    seconds: float | None


class NoTarget(ValueError):
    """No target was given, and there is no GPU to compile for."""


def targets(arch: str | None) -> list[str]:
    """The targets to compile for: the given one, or those of the GPUs here.

    Raises:
        NvrtcMissing: nothing can be compiled.
        NoTarget: there is no GPU, or NVRTC does not know the target.
        UnsupportedArch: there are no kernels for a GPU here.
    """
    known = supported_archs()
    if arch is not None:
        digits = arch.removeprefix("sm_").rstrip("a")
        if not arch.startswith("sm_") or not digits.isdigit() or int(digits) not in known:
            names = ", ".join(arch_for(divmod(number, 10), known) for number in known if number >= 80)
            raise NoTarget(f"NVRTC knows no target {arch!r}; it knows {names}")
        return [arch_for(divmod(int(digits), 10), known)]
    if not torch.cuda.is_available():
        raise NoTarget("there is no GPU to compile for; name a target, such as sm_90a for an H100 or H200")
    archs = {jit.arch_of(index) for index in range(torch.cuda.device_count())}
    return sorted(archs)


def warm_up(archs: list[str], units: Callable[[str], Sequence[Unit]] = compiled_ahead) -> Iterator[Compiled]:
    """Compile the ``units`` of some targets, all by default, one after the other.

    Raises:
        NvrtcMissing, CompileError: from the compiler.
    """
    for arch in archs:
        for unit in units(arch):
            cached = kernel_cache.read(kernel_cache.entry(unit, arch, nvrtc_version())) is not None
            began = time.perf_counter()
            jit.binary(unit, arch)
            yield Compiled(unit, arch, None if cached else time.perf_counter() - began)


def measure_costs() -> Iterator[str]:
    """Measure the costs of each GPU that runs our attention kernels, unless they are known; yields a line per GPU."""
    for index in range(torch.cuda.device_count()):
        name = f"{torch.cuda.get_device_name(index)} (cuda:{index})"
        kernel = kernel_for(jit.arch_of(index), 128, 4)
        if kernel is None or not kernel.uses_tma:
            yield f"{name}: costs are estimated, for only Hopper's kernel is measured"
            continue
        try:
            path, cost, now = measured_cost(torch.device("cuda", index))
        except ValueError as error:
            yield f"{name}: costs are estimated, for {error}"
            continue
        rates = f"decode {cost.decode.tokens_per_us:.0f}, tile {cost.tile.tokens_per_us:.0f} tokens per us and SM"
        yield f"{name}: {'measured' if now else 'was measured'}, {rates}; kept in {path}"
