"""What a call costs the CPU on a GPU machine: starting cold and warm, sixteen processes at once, and each op call.

python benchmarks/launch.py --out results/launch.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

FIRST = """
import time; began = time.perf_counter()
import torch
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
ready = time.perf_counter()
import numpy as np
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.bsr import Queries
from prefixkit.ops.kv_pool import KVPool, KVSpec
from prefixkit.attention.step import build_step, planner_for
from prefixkit.tree.radix import PrefixTree
gpu = torch.device("cuda", 0)
tree = PrefixTree(64, 16)
root = tree.insert(np.arange(300))
for leaf, sequence in enumerate(tree.fork(root, 8)):
    tree.extend(sequence, np.array([leaf]))
nodes = tree.nodes()
tree.mark_ready(nodes, [node.length - (not node.children) for node in nodes])
snapshot = tree.snapshot()
leaf = np.flatnonzero(snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1).astype(np.int32)
queries = Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf])
pool = KVPool(KVSpec(1, 8, 128, torch.bfloat16, gpu), 64, 16)
planner = planner_for(HeadShape(32, 8, 128, 2), gpu, torch.bfloat16)
tokens = np.zeros(len(leaf), dtype=np.int64)
imported = time.perf_counter()
step = build_step(snapshot, queries, tokens, tokens, planner, gpu)
held = torch.arange(64 * 16, device=gpu)
kv = torch.ones(len(held), 8, 128, device=gpu, dtype=torch.bfloat16)
pool.append(0, kv, kv, held)
q = torch.ones(len(leaf), 32, 128, device=gpu, dtype=torch.bfloat16)
out, _ = torch.ops.prefixkit.tree_attention(
    q, pool.k(0), pool.v(0), step.positions, step.work, step.nodes, 0.1, "causal"
)
torch.cuda.synchronize()
done = time.perf_counter()
assert bool((out == 1).all())
print(ready - began, imported - ready, done - ready)
"""


def starts(cache: str, processes: int) -> list[dict[str, float]]:
    """Seconds of fresh processes that start together.

    To import torch and touch the GPU; from there to import prefixkit and grow a tree; and, from there too, to the first result
    of ``tree_attention``, with planning, appending and loading the kernels.
    """
    environment = {
        **os.environ,
        "PREFIXKIT_CACHE": cache,
        "CUDA_CACHE_DISABLE": "1",  # NVRTC keeps a cache of its own, and a cold start must not find it
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:]]),
    }
    running = [
        subprocess.Popen([sys.executable, "-c", FIRST], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    times = []
    for process in running:
        printed, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a process failed with {process.returncode}")
        names = ("torch_s", "prefixkit_imported_s", "first_result_s")
        times.append({name: round(float(text), 3) for name, text in zip(names, printed.split(), strict=True)})
    return times


def per_call_us(call: Callable[[], object], calls: int = 2000) -> float:
    """Microseconds of CPU time that one call takes, the GPU keeping up."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - began)
        torch.cuda.synchronize()
    return round(best / calls * 1e6, 2)


def attention_call() -> Callable[[], object]:
    """``tree_attention`` of 64 sequences over one prefix; so short that the GPU keeps up with the CPU."""
    import numpy as np
    from prefixkit.attention.gpu_plan import H200_COST, make_gpu_plan

    from prefixkit.attention.bsr import Queries, decompose, visible_lengths
    from prefixkit.attention.sharing import HeadShape
    from prefixkit.tree.radix import PrefixTree

    tree = PrefixTree(64, 16)
    root = tree.insert(np.arange(32))
    for leaf, sequence in enumerate(tree.fork(root, 8)):
        tree.extend(sequence, np.array([leaf]))
    nodes = tree.nodes()
    tree.mark_ready(nodes, [node.length - (not node.children) for node in nodes])
    snapshot = tree.snapshot()
    leaf = np.flatnonzero(snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1).astype(np.int32)
    queries = Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf])
    length = visible_lengths(snapshot, queries)
    formats = [decompose(snapshot, queries, HeadShape(8, 2, 128, 2), H200_COST)]
    plan = make_gpu_plan(formats, length, len(leaf), group=4, kv_heads=2)
    arrays = (snapshot.start, length, snapshot.page_indptr, snapshot.pages, snapshot.first_slot)
    work = [torch.from_numpy(np.array(array)).cuda() for array in plan.arrays()]
    tensors = [torch.from_numpy(np.array(array, dtype=np.int32)).cuda() for array in arrays]
    positions = torch.from_numpy(snapshot.start[leaf].astype(np.int64) + snapshot.length[leaf] - 1).cuda()
    q = torch.randn(len(leaf), 8, 128, device="cuda", dtype=torch.bfloat16)
    pages = torch.randn(64, 2, 16, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    attend = torch.ops.prefixkit.tree_attention
    return lambda: attend(q, pages, pages, positions, work, tensors, 0.1, "causal")


def calls() -> dict[str, float]:
    """Each op through torch, below torch, and torch's own calls for comparison."""
    from prefixkit.ops import backend
    from prefixkit.ops import library as ops

    del ops
    gpu = torch.device("cuda", 0)
    key = torch.randn(64, 8, 128, device=gpu, dtype=torch.bfloat16)
    k_pages, v_pages = (torch.zeros(64, 8, 16, 128, device=gpu, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    slots = torch.arange(64, device=gpu)
    lse = torch.randn(128, 8, device=gpu)
    raw, op = backend.ops_for(gpu), torch.ops.prefixkit
    measured = {}
    with torch.inference_mode():
        for name, call in {
            "kv_append through torch": lambda: op.kv_append(key, key, k_pages, v_pages, slots),
            "kv_append below torch": lambda: raw.kv_append(key, key, k_pages, v_pages, slots),
            "tree_attention through torch": attention_call(),
            "torch: add_": lambda: lse.add_(0.0),
            "torch: empty": lambda: torch.empty(64, device=gpu),
            "torch: index_put_ twice": lambda: (
                k_pages.index_put_((slots // 16, slots % 16), key),
                v_pages.index_put_((slots // 16, slots % 16), key),
            ),
        }.items():
            call()
            measured[name] = per_call_us(call)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = starts(cache, 1), starts(cache, 1)
    with tempfile.TemporaryDirectory() as cache:
        together = starts(cache, 16)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cold": cold,
        "warm": warm,
        "sixteen at once": together,
        "us per call": calls(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
