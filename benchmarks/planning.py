"""What a plan costs: on the host, and on the GPU where there is one; and what a step costs whose tree has changed.

    OMP_NUM_THREADS=1 python benchmarks/planning.py --out benchmarks/results/planning.json

The aim: below 50 us on the GPU for 1,024 leaves and 2,048 nodes (CUDA-graph replay, median).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prefixkit.attention.gpu_plan import make_gpu_plan

from benchmarks.tree_attention.workloads import tree, tree_of
from prefixkit.attention.bsr import Queries, decompose, visible_lengths
from prefixkit.attention.capacity import capacity_for
from prefixkit.attention.gpu_cost import H200
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import Planner, build_step
from prefixkit.tree.snapshot import TreeSnapshot


def binary(levels: int, prefix: int, branch: int) -> TreeSnapshot:
    """``prefix`` tokens, then forks every ``branch`` tokens."""
    parent, length = [-1], [prefix]

    def grow(above: int, left: int) -> None:
        for _ in range(2 if left else 0):
            parent.append(above)
            length.append(branch)
            grow(len(parent) - 1, left - 1)

    grow(0, levels)
    return tree(parent, length)


def cases() -> dict[str, tuple[TreeSnapshot, Queries]]:
    shapes = {name: tree_of(name) for name in ("2L b64 p4096 s128", "2L b1024 p4096 s128", "3L fewshot", "beam d6")}
    shapes |= {"binary, 1,024 leaves, 2,047 nodes": binary(10, 1000, 32)}
    shapes |= {"chain of 2,000": tree(list(range(-1, 1999)), [8] * 2000)}
    made = {}
    for name, snapshot in shapes.items():
        leaf = np.flatnonzero(snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1).astype(np.int32)
        made[name] = snapshot, Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf])
    for tokens in (32_768, 131_072):
        snapshot = tree([-1], [tokens])
        snapshot.ready[:] = 0
        made[f"prompt of {tokens:,}"] = snapshot, Queries(*(np.array([x], np.int32) for x in (0, 0, tokens)))
    return made


def host_us(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        action()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


def gpu_us(snapshot: TreeSnapshot, queries: Queries, shape: HeadShape) -> float:
    """Median of replays of a graph that plans ten times."""
    from prefixkit.backends.cuda.planner import CudaPlanner

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    capacity = capacity_for(snapshot, queries, shape, sms)
    planner = CudaPlanner(shape, snapshot.num_nodes, capacity, "cuda")
    planner.load(snapshot, queries)
    planner.plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            planner.plan()
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    return statistics.median(times[2:])


def replan_us(
    snapshot: TreeSnapshot, queries: Queries, planner: Planner, device: str, repeats: int
) -> dict[str, float]:
    """Medians of ``build_step`` for a tree that has changed, on an idle device.

    ``host_us``: until it returns; ``done_us``: until the device has it all; ``read_us``: then ``kv_tokens_read``, on the host.
    """
    tokens = np.zeros(queries.num_rows, dtype=np.int64)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for version in range(repeats + 5):
        changed = replace(snapshot, version=version)
        wait()
        began = time.perf_counter()
        step = build_step(changed, queries, tokens, tokens, planner, device)
        returned = time.perf_counter()
        wait()
        done = time.perf_counter()
        _ = step.kv_tokens_read
        times.append((returned - began, done - began, time.perf_counter() - done))
    assert planner.plans_made == len(times)
    host, whole, read = (1e6 * statistics.median(column) for column in list(zip(*times, strict=True)))
    return {"host_us": host, "done_us": whole, "read_us": read}


def replans(repeats: int) -> list[dict[str, Any]]:
    """With plans by numpy, and by the GPU where there is one."""
    results = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, (snapshot, queries) in cases().items():
        if "chain" in name or "131" in name:
            continue
        shape = HeadShape(32, 8, 128, 2)
        planners = {"numpy": Planner(shape, H200.sharing, num_sms=132, gpu=H200)}
        if device == "cuda":
            from prefixkit.backends.cuda.planner import plan_on_gpu

            planners["GPU"] = replace(planners["numpy"], launch=partial(plan_on_gpu, shape, H200, 132))
        for by, planner in planners.items():
            row = {"case": name, "replan_by": by, **replan_us(snapshot, queries, planner, device, repeats)}
            results.append(row)
            print(
                f"32/8  {name:36s} replan by {by:5s}: host {row['host_us']:6.0f}  done {row['done_us']:6.0f}  "
                f"tokens read {row['read_us']:4.0f}",
                flush=True,
            )
    return results


def measure(repeats: int) -> list[dict[str, Any]]:
    results = []
    for name, (snapshot, queries) in cases().items():
        for heads, kv_heads in ((32, 8), (8, 1)):
            shape, length = HeadShape(heads, kv_heads, 128, 2), visible_lengths(snapshot, queries)
            rows = decompose(snapshot, queries, shape, H200.sharing)

            def plan(rows: Any = rows, length: Any = length, queries: Any = queries, shape: Any = shape) -> object:
                return make_gpu_plan([rows], length, queries.num_rows, group=shape.group, kv_heads=shape.kv_heads)

            row: dict[str, Any] = {"case": name, "heads": [heads, kv_heads]}
            row["rows_us"] = host_us(
                lambda s=snapshot, q=queries, h=shape: decompose(s, q, h, H200.sharing),  # type: ignore[misc]
                repeats,
            )
            row["plan_us"] = host_us(plan, repeats)
            if torch.cuda.is_available():
                row["gpu_us"] = gpu_us(snapshot, queries, shape)
            results.append(row)
            there = f"   GPU {row['gpu_us']:7.1f}" if "gpu_us" in row else ""
            print(
                f"{heads:2d}/{kv_heads:<2d} {name:36s} host: rows {row['rows_us']:6.0f}  plan {row['plan_us']:6.0f}{there}",
                flush=True,
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--replans-only", action="store_true")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    print("microseconds, median")
    results = ([] if options.replans_only else measure(options.repeats)) + replans(options.repeats)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
