"""What a plan costs: on the host, and on the GPU where there is one; and what a step costs whose tree has changed.

    OMP_NUM_THREADS=1 python -m benchmarks.planning --out benchmarks/results/planning.json

The aim: below 50 us on the GPU for 1,024 leaves and 2,048 nodes (CUDA-graph replay, median).
"""

import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.runner import Row, Run, arguments, replay_us, wall_seconds
from prefixkit.attention.bsr import decompose
from prefixkit.attention.capacity import capacity_for
from prefixkit.attention.gpu_cost import H200
from prefixkit.attention.plan import make_plan
from prefixkit.attention.planner import Planner
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import build_step
from prefixkit.backends.cuda.planner import CudaPlanner
from prefixkit.tree.snapshot import TreeSnapshot
from tests.named_trees import binary, leaf_queries, prompts, tree, tree_of

Case = tuple[TreeSnapshot, Queries]


def cases() -> dict[str, Case]:
    shapes = {name: tree_of(name) for name in ("2L b64 p4096 s128", "2L b1024 p4096 s128", "3L fewshot", "beam d6")}
    shapes["binary, 1,024 leaves, 2,047 nodes"] = binary(10, 1000, 32)
    shapes["chain of 2,000"] = tree(list(range(-1, 1999)), [8] * 2000)
    made = {name: (snapshot, leaf_queries(snapshot)) for name, snapshot in shapes.items()}
    return made | {f"prompt of {tokens:,}": prompts(tokens, tokens) for tokens in (32_768, 131_072)}


def gpu_us(tree: StepTree, shape: HeadShape) -> float:
    """Median of replays of a graph that plans over and over."""
    from prefixkit.backends.cuda.plan_launch import GraphPlanner

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    planner = GraphPlanner(shape, tree.snapshot.num_nodes, capacity_for(tree, shape, sms), "cuda")
    planner.load(tree)
    return replay_us(lambda _: planner.plan(), repeats=10)


def replan_us(snapshot: TreeSnapshot, queries: Queries, planner: Planner, device: str, repeats: int) -> Row:
    """Medians of ``build_step`` for a changed tree: until it returns, the device has it, ``kv_tokens_read`` is read."""
    tokens = np.zeros(queries.num_rows, dtype=np.int64)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for changed_version in range(repeats + 5):
        changed = replace(snapshot, version=changed_version)
        wait()
        began = time.perf_counter()
        step = build_step(StepTree(changed, queries), tokens, tokens, planner, device)
        returned = time.perf_counter()
        wait()
        done = time.perf_counter()
        _ = step.kv_tokens_read
        times.append((returned - began, done - began, time.perf_counter() - done))
    assert planner.plans_made == len(times)
    host, whole, read = (1e6 * statistics.median(column) for column in list(zip(*times, strict=True)))
    return {"host_us": host, "done_us": whole, "read_us": read}


def replans(run: Run, name: str, case: Case, repeats: int) -> None:
    """With plans by numpy, and by the GPU where there is one."""
    device, shape = "cuda" if torch.cuda.is_available() else "cpu", HeadShape(32, 8, 128, 2)
    planners = {"numpy": CudaPlanner(shape, H200, 132)}
    if device == "cuda":
        from prefixkit.backends.cuda.plan_launch import plan_on_gpu

        planners["GPU"] = CudaPlanner(shape, H200, 132, partial(plan_on_gpu, shape, H200, 132))
    for by, planner in planners.items():
        row = {"case": name, "replan_by": by, **replan_us(*case, planner, device, repeats)}
        times = f"host {row['host_us']:6.0f}  done {row['done_us']:6.0f}  tokens read {row['read_us']:4.0f}"
        run.add("results", row, f"32/8  {name:36s} replan by {by:5s}: {times}")


def plans(run: Run, name: str, case: Case, repeats: int) -> None:
    """A plan's two halves on the host, and all of it on the GPU."""
    step = StepTree(*case)
    for heads, kv_heads in ((32, 8), (8, 1)):
        shape = HeadShape(heads, kv_heads, 128, 2)
        rows = partial(decompose, step, shape, H200.sharing)
        sizes: dict[str, Any] = {"group": shape.group, "kv_heads": shape.kv_heads, "cost": H200}
        plan = partial(make_plan, [rows()], step.length, case[1].num_rows, **sizes)
        row: Row = {"case": name, "heads": [heads, kv_heads]}
        for what, action in (("rows_us", rows), ("plan_us", plan)):
            row[what] = 1e6 * statistics.median(wall_seconds(action, repeats, warm=3))
        line = f"{heads:2d}/{kv_heads:<2d} {name:36s} host: rows {row['rows_us']:6.0f}  plan {row['plan_us']:6.0f}"
        if torch.cuda.is_available():
            row["gpu_us"] = gpu_us(step, shape)
            line += f"   GPU {row['gpu_us']:7.1f}"
        run.add("results", row, line)


def main() -> None:
    options = arguments(__doc__, repeats=30, replans_only=False)
    print("microseconds, median")
    run, all_cases = Run(options), cases()
    for name, case in ({} if options.replans_only else all_cases).items():
        plans(run, name, case, options.repeats)
    for name, case in all_cases.items():
        if "chain" not in name and "131" not in name:
            replans(run, name, case, options.repeats)
    run.finish()


if __name__ == "__main__":
    main()
