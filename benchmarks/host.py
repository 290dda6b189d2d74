"""prefixkit's time on the host: plans there and on the GPU, steps after a change of the tree; starts, and op calls.

    OMP_NUM_THREADS=1 python -m benchmarks.host --out benchmarks/results/planning.json
    python -m benchmarks.host --launch --out launch.json      cold and warm starts, sixteen at once, calls; needs a GPU

The aim: a plan below 50 us on the GPU for 1,024 leaves and 2,048 nodes (CUDA-graph replay, median); of deep trees 100
us for 2,047 nodes and 400 for 8,191.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.runner import ROOT, Row, Run, arguments, replay_us, wall_seconds
from benchmarks.tree_attention.inputs import GPU, Pool, make
from benchmarks.tree_attention.workloads import workload
from prefixkit.attention.bsr import decompose
from prefixkit.attention.gpu.capacity import capacity_for
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.planner import Planner
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import build_step
from prefixkit.backends.cuda.device_planner import CudaPlanner
from prefixkit.backends.cuda.plan_launch import GraphPlanner, plan_on_gpu
from prefixkit.ops.backend import backend_for
from prefixkit.testing.named_trees import binary, leaf_queries, prompts, tree, tree_of
from prefixkit.tree.snapshot import TreeSnapshot

Case = tuple[TreeSnapshot, Queries]
FIRST = """# A process of its own; it prints the seconds of its three parts.
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
from prefixkit.kv.kv_pool import KVPool
from prefixkit.testing.kv_specs import spec_of_alike
from prefixkit.testing.named_trees import leaf_queries, tree_of
gpu, bf16, snapshot = torch.device("cuda", 0), torch.bfloat16, tree_of("2L b8 p300 s1")
tree = StepTree(snapshot, leaf_queries(snapshot))
pool = KVPool(spec_of_alike(1, 8, 128, bf16, gpu), 64, 16)
planner = backend_for(gpu).planner_for(HeadShape(32, 8, 128, 2), gpu, bf16)
tokens = np.zeros(8, dtype=np.int64)
imported = time.perf_counter()
step = build_step(tree, tokens, tokens, planner, gpu)
kv = torch.ones(64 * 16, 8, 128, device=gpu, dtype=bf16)
torch.ops.prefixkit.kv_append(kv, kv, pool.pages(0)[0], pool.pages(0)[1], torch.arange(64 * 16, device=gpu))
q = torch.ones(8, 32, 128, device=gpu, dtype=bf16)
op = torch.ops.prefixkit.tree_attention
out, _ = op(q, pool.pages(0)[0], pool.pages(0)[1], step.positions, step.plan, 0.1, "causal")
torch.cuda.synchronize()
done = time.perf_counter()
assert bool((out == 1).all())
print(ready - began, imported - ready, done - ready)
"""


def starts(cache: str, processes: int) -> list[dict[str, float]]:
    """Seconds of fresh processes that start together: until torch has the GPU, then for imports, then to a result."""
    # NVRTC has a cache of its own, which a cold start must not find.
    paths = os.pathsep.join([str(ROOT), *sys.path[1:]])
    own = {"PREFIXKIT_CACHE": cache, "CUDA_CACHE_DISABLE": "1", "PYTHONPATH": paths}
    options = {"env": os.environ | own, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", FIRST], **options) for _ in range(processes)]
    names, printed = ("torch_s", "prefixkit_imported_s", "first_result_s"), [of.communicate()[0] for of in running]
    if failed := [process.returncode for process in running if process.returncode]:
        raise SystemExit(f"a process failed with {failed[0]}")
    return [dict(zip(names, (round(float(part), 3) for part in text.split()), strict=True)) for text in printed]


def call_us(call: Any) -> float:
    """Microseconds of CPU time of one call, while the GPU keeps up."""
    seconds = min(timeit.repeat(call, torch.cuda.synchronize, repeat=5, number=2000))
    torch.cuda.synchronize()
    return round(seconds / 2000 * 1e6, 2)


def calls() -> dict[str, float]:
    """CPU times of each op called through torch and directly, and of torch's own calls for comparison."""
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
        return {name: call_us(call) for name, call in measured.items()}


def cases() -> dict[str, Case]:
    shapes = {name: tree_of(name) for name in ("2L b64 p4096 s128", "2L b1024 p4096 s128", "3L fewshot", "beam d6")}
    shapes["binary, 1,024 leaves, 2,047 nodes"] = binary(10, 1000, 32)
    shapes["chain of 2,000"] = tree(list(range(-1, 1999)), [8] * 2000)
    # Deep trees: 2,047 and 8,191 nodes of a spine and its leaves, and of a search.
    shapes |= {name: tree_of(name) for name in ("spine p2048 d1023 t1 s16", "spine p2048 d4095 t1 s16")}
    shapes |= {name: tree_of(name) for name in ("search p700 n2046 t5-60", "search p700 n8190 t5-60")}
    made = {name: (snapshot, leaf_queries(snapshot)) for name, snapshot in shapes.items()}
    return made | {f"prompt of {tokens:,}": prompts(tokens, tokens) for tokens in (32_768, 131_072)}


def replan_us(snapshot: TreeSnapshot, queries: Queries, planner: Planner, device: str, repeats: int) -> Row:
    """Medians of ``build_step`` for a changed tree: until it returns, until the device has the step, and until
    ``kv_tokens_read`` is read.
    """
    tokens, times = np.zeros(queries.num_rows, dtype=np.int64), []
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for version in range(repeats + 5):
        changed = replace(snapshot, version=version)
        wait()
        began = time.perf_counter()
        step = build_step(StepTree(changed, queries), tokens, tokens, planner, device)
        returned = time.perf_counter()
        wait()
        done = time.perf_counter()
        _ = step.kv_tokens[0]
        times.append((returned - began, done - began, time.perf_counter() - done))
    assert planner.plans_made == len(times)
    medians = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
    return dict(zip(("host_us", "done_us", "read_us"), medians, strict=True))


def replans(run: Run, name: str, case: Case, repeats: int) -> None:
    """Steps with plans by numpy, and by the GPU if there is one."""
    device, shape = "cuda" if torch.cuda.is_available() else "cpu", HeadShape(32, 8, 128, 2)
    planners = {"numpy": CudaPlanner(shape, H200, 132)}
    if device == "cuda":
        planners["GPU"] = CudaPlanner(shape, H200, 132, partial(plan_on_gpu, shape, H200, 132))
    for by, planner in planners.items():
        row = {"case": name, "replan_by": by, **replan_us(*case, planner, device, repeats)}
        times = f"host {row['host_us']:6.0f}  done {row['done_us']:6.0f}  tokens read {row['read_us']:4.0f}"
        run.add("results", row, f"32/8  {name:36s} replan by {by:5s}: {times}")


def plans(run: Run, name: str, case: Case, repeats: int, *, paths: bool) -> None:
    """A plan's two halves on the host, and all of it on the GPU; ``paths``: by heavy paths."""
    step = StepTree(*case)
    for heads, kv_heads in ((32, 8), (8, 1)):
        shape = HeadShape(heads, kv_heads, 128, 2)
        rows = partial(decompose, step, shape, H200.sharing, paths=paths)
        plan = partial(make_gpu_plan, [rows()], step.length, case[1].num_rows, shape, 132, H200)
        row: Row = {"case": name, "heads": [heads, kv_heads], "paths": paths}
        for what, action in (("rows_us", rows), ("plan_us", plan)):
            row[what] = 1e6 * statistics.median(wall_seconds(action, repeats, warm=3))
        line = f"{heads:2d}/{kv_heads:<2d} {name:36s} {'by paths ' if paths else ''}"
        line += f"host: rows {row['rows_us']:6.0f}  plan {row['plan_us']:6.0f}"
        if torch.cuda.is_available():
            sms = torch.cuda.get_device_properties(0).multi_processor_count
            capacity = capacity_for(step, shape, sms, paths=paths)
            planner = GraphPlanner(shape, step.snapshot.num_nodes, capacity, "cuda", paths=paths)
            planner.upload(step)
            row["gpu_us"] = replay_us(lambda _, planner=planner: planner.plan(), repeats=10)  # each replay plans
            line += f"   GPU {row['gpu_us']:7.1f}"
        run.add("results", row, line)


def main() -> None:
    options = arguments(__doc__, repeats=30, replans_only=False, launch=False)
    run, all_cases = Run(options), cases()
    if options.launch:
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as other:
            run.result |= {"cold": starts(cache, 1), "warm": starts(cache, 1), "sixteen at once": starts(other, 16)}
        run.result["us per call"] = calls()
        run.finish("cold", "warm", "sixteen at once", "us per call")
        return
    print("microseconds, median")
    for name, case in ({} if options.replans_only else all_cases).items():
        deep = StepTree(*case).is_deep
        for paths in {deep, deep and not name.startswith("binary")}:  # the binary tree both ways
            plans(run, name, case, options.repeats, paths=paths)
    for name, case in all_cases.items():
        if "chain" not in name and "131" not in name:
            replans(run, name, case, options.repeats)
    run.finish()


if __name__ == "__main__":
    main()
