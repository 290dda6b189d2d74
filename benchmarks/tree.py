"""What the prefix tree costs on one CPU thread: building it, admitting prompts to it, and its share of a decode step.

Four questions, each with a target:

- build: 1,024 sequences of 16,384 tokens that differ in their last 128; below 0.2 s.
- linearity: time per token from 1e5 to 1e7 tokens; the slope of log(time) over log(tokens) should be 1.
- admission: 500 to 10,000 prompts of some 100 tokens, 70 of them shared by 50 prompts: sizing the pool, queueing, admitting and
  retiring; 10,000 below 0.5 s, and linear.
- decode: `extend_each` for 1,024 leaves, `mark_ready` and `snapshot()`; below 2 ms at the median, steps that take new
  pages included.  Beside it, the same with beams that fork and die at every step, where the snapshot is rebuilt.

    OMP_NUM_THREADS=1 python benchmarks/tree.py --out benchmarks/results/tree.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.memory import pages_needed
from prefixkit.engine.request import Request
from prefixkit.engine.scheduler import Scheduler
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree import PrefixTree, Sequence

VOCABULARY = 50_000


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def with_tails(rng: np.random.Generator, count: int, length: int, tail: int) -> list[NDArray[np.int32]]:
    """``count`` sequences of ``length`` tokens that differ only in the last ``tail``."""
    shared = rng.integers(0, VOCABULARY, length - tail, dtype=np.int32)
    return [np.concatenate([shared, rng.integers(0, VOCABULARY, tail, dtype=np.int32)]) for _ in range(count)]


def insert_all(sequences: list[Any], page_size: int) -> PrefixTree:
    tree = PrefixTree(sum(map(len, sequences)) // page_size + 2 * len(sequences), page_size)
    for sequence in sequences:
        tree.insert(sequence)
    return tree


def measure_build(rng: np.random.Generator, repeats: int) -> list[dict[str, Any]]:
    rows = []
    sequences = with_tails(rng, 1024, 16_384, 128)
    for dtype in (np.int32, np.int64):
        given = [sequence.astype(dtype) for sequence in sequences]
        for page_size in (1, 16, 128):
            times = [seconds(lambda g=given, p=page_size: insert_all(g, p)) for _ in range(repeats)]  # type: ignore[misc]
            rows.append(
                {
                    "dtype": np.dtype(dtype).name,
                    "page_size": page_size,
                    "median_s": statistics.median(times),
                    "worst_s": max(times),
                }
            )
    return rows


def measure_linearity(rng: np.random.Generator, repeats: int) -> dict[str, Any]:
    """Many sequences of 4,096 tokens that differ in the last 128; and two as long as half the tokens."""
    shapes: dict[str, Callable[[int], tuple[int, int]]] = {
        "sequences of 4,096": lambda total: (round(total / 4096), 4096),
        "two sequences": lambda total: (2, total // 2),
    }
    result: dict[str, Any] = {}
    for name, shape in shapes.items():
        rows = []
        for total in (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000):
            count, length = shape(total)
            sequences = with_tails(rng, count, length, 128)
            median = statistics.median(seconds(lambda s=sequences: insert_all(s, 16)) for _ in range(repeats))  # type: ignore[misc]
            rows.append({"tokens": count * length, "median_s": median, "ns_per_token": 1e9 * median / count / length})
        tokens, times = (np.log([row[key] for row in rows]) for key in ("tokens", "median_s"))
        result[name] = {"rows": rows, "slope": float(np.polyfit(tokens, times, 1)[0])}
    return result


def measure_admission(rng: np.random.Generator, repeats: int) -> list[dict[str, Any]]:
    """All prompts at once into a pool that holds them, and each retired in order of admission."""
    rows = []
    for count in (500, 2_000, 10_000):
        groups = [
            with_tails(rng, 50, int(rng.integers(90, 131)), int(rng.integers(20, 61))) for _ in range(count // 50)
        ]
        prompts = [prompt for group in groups for prompt in group]
        rng.shuffle(prompts)
        requests = [Request(index, prompt, SamplingParams()) for index, prompt in enumerate(prompts)]
        parts: dict[str, list[float]] = {"size": [], "submit": [], "admit": [], "retire": []}
        for _ in range(repeats):
            size = seconds(lambda r=requests: pages_needed(r, 16))  # type: ignore[misc]
            scheduler = Scheduler(PrefixTree(pages_needed(requests, 16), 16), lambda: 0)
            submit = seconds(lambda s=scheduler, r=requests: s.submit(r))  # type: ignore[misc]
            admit = seconds(scheduler.admit)
            assert len(scheduler.groups) == count
            retire = seconds(lambda s=scheduler: [s.retire(group) for group in s.groups])  # type: ignore[misc]
            for name, value in zip(parts, (size, submit, admit, retire), strict=True):
                parts[name].append(value)
        rows.append({"prompts": count} | {f"{name}_s": statistics.median(times) for name, times in parts.items()})
    return rows


def binary_tree(rng: np.random.Generator, page_size: int, prefix: int) -> tuple[PrefixTree, list[Sequence]]:
    """1,024 leaves below 1,023 inner nodes: ``prefix`` shared tokens, then ten levels of forks, 32 tokens apart."""
    paths = [rng.integers(0, VOCABULARY, prefix, dtype=np.int32)]
    for _ in range(10):
        paths = [
            np.concatenate([path, [branch], rng.integers(0, VOCABULARY, 31)]).astype(np.int32)
            for path in paths
            for branch in (0, 1)
        ]
    tree = PrefixTree((prefix + 4_000_000) // page_size, page_size)
    handles = [tree.insert(path) for path in paths]
    pending = tree.pending()
    tree.mark_ready([node for node, _, _ in pending], [length for _, _, length in pending])
    tree.snapshot()
    return tree, handles


def measure_decode(rng: np.random.Generator, page_size: int, prefix: int, steps: int) -> dict[str, Any]:
    tree, handles = binary_tree(rng, page_size, prefix)
    parts: dict[str, list[float]] = {"extend_each": [], "mark_ready": [], "snapshot": [], "step": []}
    for _ in range(steps):
        tokens = rng.integers(0, VOCABULARY, len(handles)).tolist()
        extend = seconds(lambda t=tokens: tree.extend_each(handles, t))  # type: ignore[misc]
        nodes = [handle.node for handle in handles]
        ready = [node.length for node in nodes]
        mark = seconds(lambda n=nodes, r=ready: tree.mark_ready(n, r))  # type: ignore[misc]
        freeze = seconds(tree.snapshot)
        for name, value in zip(parts, (extend, mark, freeze, extend + mark + freeze), strict=True):
            parts[name].append(1e3 * value)
    tree.check()
    case = {"case": "decode", "page_size": page_size, "prefix": prefix, "nodes": tree.stats().nodes, "steps": steps}
    return case | {f"{name}_ms": quantiles(times) for name, times in parts.items()}


def measure_beams(rng: np.random.Generator, page_size: int, beams: int, steps: int) -> dict[str, Any]:
    """Each step draws its survivors with replacement: some beams fork, others die, and the structure changes."""
    tree = PrefixTree(4_000_000 // page_size, page_size)
    handles = tree.fork(tree.insert(rng.integers(0, VOCABULARY, 1000)), beams)
    times = []

    def step() -> None:
        nonlocal handles
        chosen = np.bincount(rng.integers(0, beams, beams), minlength=beams).tolist()
        survivors = [
            kept
            for handle, count in zip(handles, chosen, strict=True)
            if count
            for kept in [handle, *(tree.fork(handle, count - 1) if count > 1 else [])]
        ]
        for handle, count in zip(handles, chosen, strict=True):
            if not count:
                tree.release(handle)
        handles = survivors
        tree.extend_each(handles, rng.integers(0, VOCABULARY, beams))
        pending = tree.pending()
        tree.mark_ready([node for node, _, _ in pending], [length for _, _, length in pending])
        tree.snapshot()

    times = [1e3 * seconds(step) for _ in range(steps)]
    tree.check()
    case = {"case": "beams", "page_size": page_size, "prefix": 1000, "nodes": tree.stats().nodes, "steps": steps}
    return case | {"beams": beams, "step_ms": quantiles(times)}


def quantiles(times: list[float]) -> dict[str, float]:
    return {
        "best": min(times),
        "median": statistics.median(times),
        "mean": statistics.fmean(times),
        "p99": float(np.quantile(times, 0.99)),
    }


def report(results: dict[str, Any]) -> None:
    print("build: 1,024 sequences of 16,384 tokens, the last 128 differ (target 0.2 s)")
    for row in results["build"]:
        print(
            f"  {row['dtype']}  page {row['page_size']:>3}   median {row['median_s']:.3f} s  worst {row['worst_s']:.3f} s"
        )
    print("linearity (target: slope 1)")
    for name, series in results["linearity"].items():
        cells = "  ".join(f"{row['tokens']:.0e}: {row['ns_per_token']:.2f}" for row in series["rows"])
        print(f"  {name:<18}  slope {series['slope']:.2f}   ns per token  {cells}")
    print("admission (target: 0.5 s for 10,000 prompts)")
    for row in results["admission"]:
        cells = "  ".join(f"{name} {row[f'{name}_s']:.3f}" for name in ("size", "submit", "admit", "retire"))
        print(f"  {row['prompts']:>6} prompts   {sum(row.values()) - row['prompts']:.3f} s   {cells}")
    print("a step's tree work, ms (target: median below 2)")
    for row in results["steps"]:
        what = f"{row['case']}, page {row['page_size']:>3}, prefix {row['prefix']:>6}, {row['nodes']} nodes"
        cells = "  ".join(
            f"{name[:-3]} {row[name]['median']:.2f}"
            for name in ("extend_each_ms", "mark_ready_ms", "snapshot_ms")
            if name in row
        )
        total = row["step_ms"]
        print(f"  {what:<46}  median {total['median']:.2f}  mean {total['mean']:.2f}  p99 {total['p99']:.2f}   {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each build")
    parser.add_argument("--steps", type=int, default=400, help="decode steps of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    arguments = parser.parse_args()

    rng = np.random.default_rng(arguments.seed)
    cases = [(1, 0), (16, 0), (128, 0), (1, 100_000), (16, 100_000)]
    results = {
        "machine": {
            "processor": processor(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "load": os.getloadavg()[0],
        },
        "seed": arguments.seed,
        "build": measure_build(rng, arguments.repeats),
        "linearity": measure_linearity(rng, arguments.repeats),
        "admission": measure_admission(rng, arguments.repeats),
        "steps": [measure_decode(rng, page_size, prefix, arguments.steps) for page_size, prefix in cases]
        + [measure_beams(rng, 1, beams, arguments.steps) for beams in (16, 1024)],
    }
    report(results)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    )
    return names[0].split(":")[1].strip() if names else platform.processor()


if __name__ == "__main__":
    main()
