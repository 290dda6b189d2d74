"""Times of captured graphs, and what the machine can do at most."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch

# Inputs rotate through so many bytes, more than twice the L2 of an H200.
ROTATE_BYTES = 1.5e8
GRAPH_US, WARM_US, LONG_CALL_US = 1_000.0, 10_000.0, 10_000.0


def input_sets(kv_bytes: int) -> int:
    """How many sets of inputs to rotate through, so that none is still in the L2 when its turn comes."""
    return max(1, min(8, int(ROTATE_BYTES // max(kv_bytes, 1)) + 1))


def replay_us(run: Callable[[int], object], sets: int, repeats: int = 7) -> float:
    """Microseconds of one call, the median over replays of a captured graph that goes through all input sets.

    A graph holds about a millisecond of calls, so that starting it does not count, and is replayed for some milliseconds first,
    so that the clocks are up.
    """
    for index in range(sets):
        run(index)
    about = max(_elapsed_us(lambda: run(0)), 1.0)
    calls = -(-max(8, min(64, int(GRAPH_US / about))) // sets) * sets if about < LONG_CALL_US else sets
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(call % sets)
    about = _elapsed_us(graph.replay)
    for _ in range(min(20, int(WARM_US / about))):
        graph.replay()
    repeats = repeats if about < 2 * LONG_CALL_US else 3
    return float(np.median([_elapsed_us(graph.replay) / calls for _ in range(repeats)]))


def _elapsed_us(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def machine() -> dict[str, object]:
    """Names and versions of what ran."""
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "l2_bytes": gpu.L2_cache_size,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "flashinfer-python", "cuda-core")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    from prefixkit.ops.backend import facts

    return dict(facts()).get("driver", "unknown")


def ceilings() -> dict[str, float]:
    """Bandwidth of a copy (bytes read and written), rate of a bf16 matrix product, one tiny node of a graph: here and now."""
    a = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    copy = replay_us(lambda _: torch.neg(a, out=b), 1)  # a kernel; copy_ would be a copy engine's
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "xy")
    product = replay_us(lambda _: x @ y, 1)
    small = torch.zeros(1, device="cuda")
    node = replay_us(lambda _: small.add_(1.0), 1)
    return {
        "copy_TBps": round(2 * 2**31 / copy / 1e6, 3),
        "matmul_TFLOPs": round(2 * 8192**3 / product / 1e6, 1),
        "graph_node_us": round(node, 3),
    }
