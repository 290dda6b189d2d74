"""Tree attention on one GPU: the 87 decode workloads, time over floor and anchor over ours.

python benchmarks/attention.py [--anchors FILE] [--only TEXT] [--out FILE]

CUDA-graph replay, median, inputs rotated past the L2.  Anchors are other systems' times measured before on the same kind of GPU
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention import ops  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.attention.cost import HeadShape
from prefixkit.attention.formats import Queries, decompose, visible_lengths
from prefixkit.attention.gpu_plan import H200_COST, make_gpu_plan
from prefixkit.tree.snapshot import TreeSnapshot

HEADS = ((8, 1), (32, 8), (32, 32))
HEAD_DIM, PAGE = 128, 16
READ_TBPS, MATMUL_TFLOPS = 4.3, 790.0


def tree(parent: list[int], length: list[int]) -> TreeSnapshot:
    """A tree in depth-first order, every node on pages of its own."""
    nodes = len(parent)
    start, size = np.zeros(nodes, np.int32), np.ones(nodes, np.int32)
    for node, above in enumerate(parent):
        start[node] = start[above] + length[above] if above >= 0 else 0
    for node in range(nodes - 1, 0, -1):
        if parent[node] >= 0:
            size[parent[node]] += size[node]
    tokens = np.array(length, np.int32)
    indptr = np.concatenate(([0], np.cumsum(-(-tokens // PAGE)))).astype(np.int32)
    return TreeSnapshot(
        version=1,
        page_size=PAGE,
        parent=np.array(parent, np.int32),
        subtree_end=(np.arange(nodes) + size).astype(np.int32),
        start=start,
        length=tokens,
        ready=tokens.copy(),
        first_slot=np.zeros(nodes, np.int32),
        page_indptr=indptr,
        pages=np.arange(indptr[-1], dtype=np.int32),
        sequence_node=np.zeros(0, np.int32),
        sequence_id=np.zeros(0, np.int64),
    )


def workload(name: str) -> TreeSnapshot:
    """``2L bB pP sS``, ``3L fewshot`` or ``beam d6``."""
    if name == "3L fewshot":
        parent, length = [-1], [2400]
        for _ in range(8):
            problem = len(parent)
            parent, length = [*parent, 0, *[problem] * 128], [*length, 400, *[256] * 128]
        return tree(parent, length)
    if name == "beam d6":
        parent, length = [-1], [2048]

        def grow(above: int, levels: int) -> None:
            for _ in range(2 if levels else 0):
                parent.append(above)
                length.append(64)
                grow(len(parent) - 1, levels - 1)

        grow(0, 6)
        return tree(parent, length)
    batch, prefix, suffix = (int(part[1:]) for part in name.split()[1:])
    return tree([-1] + [0] * batch, [prefix] + [suffix] * batch)


def names() -> list[str]:
    two_level = [f"2L b{b} p{p} s{s}" for b in (64, 256, 1024) for p in (1024, 4096, 16384) for s in (16, 128, 512)]
    return ["3L fewshot", "beam d6", *two_level]


def floor_us(snapshot: TreeSnapshot, heads: int, kv_heads: int) -> float:
    """The larger of KV bytes over read bandwidth and flops over matmul rate; one query at each leaf's end."""
    leaf = np.flatnonzero(snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1)
    seen = int((snapshot.start[leaf] + snapshot.length[leaf]).sum())
    read = 4 * HEAD_DIM * kv_heads * snapshot.num_tokens / READ_TBPS / 1e6
    return max(read, 4 * HEAD_DIM * heads * seen / MATMUL_TFLOPS / 1e6)


def replay_us(run: Callable[[int], object], sets: int, repeats: int = 7) -> float:
    """Median time of one call in a captured graph that goes through all input sets."""
    calls = max(sets, 8)
    for index in range(sets):
        run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(call % sets)
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return float(np.median(times[1:]))


def ours_us(snapshot: TreeSnapshot, heads: int, kv_heads: int) -> float:
    leaf = np.flatnonzero(snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1).astype(np.int32)
    queries = Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf])
    length = visible_lengths(snapshot, queries)
    formats = decompose(snapshot, queries, HeadShape(heads, kv_heads, HEAD_DIM, 2), H200_COST)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = make_gpu_plan(formats, length, len(leaf), group=heads // kv_heads, kv_heads=kv_heads, num_sms=sms)
    work = [torch.from_numpy(array).cuda() for array in plan.arrays()]
    arrays = (snapshot.start, length, snapshot.page_indptr, snapshot.pages, snapshot.first_slot)
    nodes = [torch.from_numpy(np.ascontiguousarray(array, np.int32)).cuda() for array in arrays]
    positions = torch.from_numpy((snapshot.start + snapshot.length - 1)[leaf].astype(np.int64)).cuda()
    pages = int(snapshot.page_indptr[-1])
    sets = max(1, min(8, int(1.5e8 // (4 * HEAD_DIM * kv_heads * snapshot.num_tokens)) + 1))
    q = [torch.randn(len(leaf), heads, HEAD_DIM, device="cuda").bfloat16() for _ in range(sets)]
    kv = [[_pages(pages, kv_heads) for _ in range(2)] for _ in range(sets)]
    scale = HEAD_DIM**-0.5
    return replay_us(
        lambda i: torch.ops.prefixkit.tree_attention(q[i], *kv[i], positions, work, nodes, scale, "causal"), sets
    )


def _pages(pages: int, kv_heads: int) -> Tensor:
    return torch.empty(pages, kv_heads, PAGE, HEAD_DIM, device="cuda", dtype=torch.bfloat16).normal_().transpose(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=Path, help="JSON of other systems' times")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    options = parser.parse_args()
    known = json.loads(options.anchors.read_text())["workloads"] if options.anchors else []
    anchors = {(w["q_heads"], w["kv_heads"], w["workload"]): w for w in known}
    results = []
    for heads, kv_heads in HEADS:
        for name in names():
            if options.only not in f"{heads}/{kv_heads} {name}":
                continue
            snapshot = workload(name)
            us, floor = ours_us(snapshot, heads, kv_heads), floor_us(snapshot, heads, kv_heads)
            best = anchors.get((heads, kv_heads, name), {})
            rivals = {key: best[key] for key in ("best", "best_us") if key in best}
            results.append({"heads": [heads, kv_heads], "workload": name, "us": us, "floor_us": floor, **rivals})
            rival = f"best anchor {best['best_us']:8.1f} ({best['best']}) {best['best_us'] / us:5.2f}x" if best else ""
            print(
                f"{heads:2d}/{kv_heads:<2d} {name:20s} {us:8.1f} us  floor {floor:7.1f} x{us / floor:6.2f}  {rival}",
                flush=True,
            )
            torch.cuda.empty_cache()
    ratios = [math.log(r["best_us"] / r["us"]) for r in results if "best_us" in r]
    if ratios:
        print(f"geometric mean {math.exp(sum(ratios) / len(ratios)):.3f} times faster than each workload's best anchor")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
