"""``prefixkit warmup``: compile the CUDA kernels ahead, and measure what attention costs on the GPUs here."""

from __future__ import annotations

from rich.console import Console

from prefixkit.cli.terminal import line


def run_warmup(arch: str | None, console: Console) -> None:
    """Compile for the GPUs here, or for the target given, a line per unit; then measure the GPUs, unless a target is given."""
    from prefixkit.backends.cuda.warmup import measure_costs, targets, warm_up
    from prefixkit.cuda import kernel_cache

    for done in warm_up(targets(arch)):
        took = "was there" if done.seconds is None else f"{done.seconds:.1f} s"
        console.print(line(f"{done.arch}  {done.unit}: {took}"))
    console.print(line(f"kept in {kernel_cache.folder()}"))
    if arch is None:
        for cost in measure_costs():
            console.print(line(cost))
