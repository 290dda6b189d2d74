"""What a call costs the CPU on a GPU machine: starting cold and warm, sixteen processes at once, and each op call.

python -m benchmarks.launch --out benchmarks/results/launch.json
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch

from benchmarks.runner import ROOT, Run, arguments, wall_seconds
from benchmarks.tree_attention.inputs import GPU, Pool, make
from benchmarks.tree_attention.workloads import workload

# A process of its own; it prints the seconds of its three parts.
FIRST = """
import time; began = time.perf_counter()
import torch
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
ready = time.perf_counter()
import numpy as np
import prefixkit.backends, prefixkit.ops.library
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import build_step
from prefixkit.ops.backend import backend_for
from prefixkit.ops.kv_pool import KVPool, KVSpec
from tests.named_trees import leaf_queries, tree_of
gpu, bf16, snapshot = torch.device("cuda", 0), torch.bfloat16, tree_of("2L b8 p300 s1")
tree = StepTree(snapshot, leaf_queries(snapshot))
pool = KVPool(KVSpec(1, 8, 128, bf16, gpu), 64, 16)
planner = backend_for(gpu).planner_for(HeadShape(32, 8, 128, 2), gpu, bf16)
tokens = np.zeros(8, dtype=np.int64)
imported = time.perf_counter()
step = build_step(tree, tokens, tokens, planner, gpu)
kv = torch.ones(64 * 16, 8, 128, device=gpu, dtype=bf16)
pool.append(0, kv, kv, torch.arange(64 * 16, device=gpu))
q = torch.ones(8, 32, 128, device=gpu, dtype=bf16)
op = torch.ops.prefixkit.tree_attention
out, _ = op(q, pool.k(0), pool.v(0), step.positions, step.plan, 0.1, "causal")
torch.cuda.synchronize()
done = time.perf_counter()
assert bool((out == 1).all())
print(ready - began, imported - ready, done - ready)
"""


def starts(cache: str, processes: int) -> list[dict[str, float]]:
    """Seconds of fresh processes that start together: until torch has touched the GPU, from there until prefixkit is
    imported, and until ``tree_attention`` has its first result, planning, appending and loading kernels included."""
    # NVRTC keeps a cache of its own, and a cold start must not find it.
    paths = os.pathsep.join([str(ROOT), *sys.path[1:]])
    own = {"PREFIXKIT_CACHE": cache, "CUDA_CACHE_DISABLE": "1", "PYTHONPATH": paths}
    command, times = [sys.executable, "-c", FIRST], []
    options = {"env": os.environ | own, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **options) for _ in range(processes)]
    for process in running:
        printed, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a process failed with {process.returncode}")
        names = ("torch_s", "prefixkit_imported_s", "first_result_s")
        times.append({name: round(float(text), 3) for name, text in zip(names, printed.split(), strict=True)})
    return times


def per_call_us(call: Callable[[], object], calls: int = 2000) -> float:
    """Microseconds of CPU time that one call takes, the GPU keeping up."""

    def many() -> None:
        for _ in range(calls):
            call()

    best: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        best += wall_seconds(many)
    torch.cuda.synchronize()
    return round(min(best) / calls * 1e6, 2)


def calls() -> dict[str, float]:
    """Each op through torch, below torch, and torch's own calls for comparison."""
    from prefixkit.ops.backend import backend_for

    key = torch.randn(64, 8, 128, device=GPU, dtype=torch.bfloat16)
    k_pages, v_pages = (torch.zeros(64, 8, 16, 128, device=GPU, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    slots = torch.arange(64, device=GPU)
    lse = torch.randn(128, 8, device=GPU)
    raw, op = backend_for(torch.device("cuda", 0)), torch.ops.prefixkit
    few = make(workload("2L b8 p32 s16", 8, 2), Pool())  # so short that the GPU keeps up with the CPU
    pages, step = (few.k[0].transpose(1, 2), few.v[0].transpose(1, 2)), few.step
    attention = (few.q[0], *pages, step.positions, step.plan, few.scale, "causal")
    append = key, key, k_pages, v_pages, slots
    measured = {
        "kv_append through torch": lambda: op.kv_append(*append),
        "kv_append below torch": lambda: raw.kv_append(*append),
        "tree_attention through torch": lambda: op.tree_attention(*attention),
        "torch: add_": lambda: lse.add_(0.0),
        "torch: empty": lambda: torch.empty(64, device=GPU),
        "torch: index_put_ twice": lambda: [kv.index_put_((slots // 16, slots % 16), key) for kv in (k_pages, v_pages)],
    }
    with torch.inference_mode():
        return {name: per_call_us(call) for name, call in measured.items()}


def main() -> None:
    run = Run(arguments(__doc__))
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = starts(cache, 1), starts(cache, 1)
    with tempfile.TemporaryDirectory() as cache:
        together = starts(cache, 16)
    run.result |= {"cold": cold, "warm": warm, "sixteen at once": together, "us per call": calls()}
    run.finish()
    print(json.dumps(run.result, indent=2))


if __name__ == "__main__":
    main()
