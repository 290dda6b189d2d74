"""The time of the prefix tree on one CPU thread: building it, admitting prompts, and its share of a decode step.

    OMP_NUM_THREADS=1 python -m benchmarks.tree --out benchmarks/results/tree.json

``benchmarks/compare.py`` calls ``with_tails`` and ``insert_all`` in every checkout.
"""

import itertools
import statistics
from typing import Any

import numpy as np

from benchmarks.runner import Row, Run, arguments, spread, wall_seconds
from prefixkit.engine.call import Call
from prefixkit.engine.frozen_heap import frozen_heap
from prefixkit.engine.memory import pages_needed
from prefixkit.engine.policy import EngineSettings
from prefixkit.engine.request import Request
from prefixkit.engine.scheduler import Scheduler
from prefixkit.kv.kv_pool import KVPool
from prefixkit.kv.store import KVStore
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.integrity import check_tree
from prefixkit.testing.kv_specs import spec_of_alike
from prefixkit.tree import PrefixTree, Sequence

VOCABULARY = 50_000


def with_tails(rng: np.random.Generator, count: int, length: int, tail: int) -> list[np.ndarray]:
    """``count`` sequences of ``length`` int32 tokens that differ only in the last ``tail``."""
    shared = rng.integers(0, VOCABULARY, length - tail, dtype=np.int32)
    return [np.concatenate([shared, rng.integers(0, VOCABULARY, tail, dtype=np.int32)]) for _ in range(count)]


def insert_all(sequences: list[Any], page_size: int) -> PrefixTree:
    tree = PrefixTree(sum(map(len, sequences)) // page_size + 2 * len(sequences), page_size)
    for sequence in sequences:
        tree.insert(sequence)
    return tree


def mark_all(tree: PrefixTree) -> None:
    tree.mark_computed(tree.nodes(), tree.snapshot().length)


def measure_build(run: Run, rng: np.random.Generator, repeats: int) -> None:
    print("build: 1,024 sequences of 16,384 tokens, the last 128 differ (target 0.2 s)")
    sequences = with_tails(rng, 1024, 16_384, 128)
    for dtype, page_size in itertools.product((np.int32, np.int64), (1, 16, 128)):
        given = [sequence.astype(dtype) for sequence in sequences]
        times = spread(wall_seconds(lambda g=given, p=page_size: insert_all(g, p), repeats))
        took = {"median_s": times["median"], "worst_s": times["worst"]}
        text = f"page {page_size:>3}   median {times['median']:.3f} s  worst {times['worst']:.3f} s"
        name = np.dtype(dtype).name
        run.add("build", {"dtype": name, "page_size": page_size, **took}, f"  {name}  {text}")


def measure_linearity(run: Run, rng: np.random.Generator, repeats: int) -> None:
    """Many sequences of 4,096 tokens that differ in the last 128; and two as long as half the tokens."""
    print("linearity (target: slope 1)")
    run.result["linearity"], totals = {}, (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
    many, two = [(round(total / 4096), 4096) for total in totals], [(2, total // 2) for total in totals]
    for name, shapes in (("sequences of 4,096", many), ("two sequences", two)):
        rows = []
        for count, length in shapes:
            sequences = with_tails(rng, count, length, 128)
            median = statistics.median(wall_seconds(lambda s=sequences: insert_all(s, 16), repeats))
            rows.append({"tokens": count * length, "median_s": median, "ns_per_token": 1e9 * median / count / length})
        tokens, times = (np.log([row[key] for row in rows]) for key in ("tokens", "median_s"))
        slope = float(np.polyfit(tokens, times, 1)[0])
        run.result["linearity"][name] = {"rows": rows, "slope": slope}
        cells = "  ".join(f"{row['tokens']:.0e}: {row['ns_per_token']:.2f}" for row in rows)
        print(f"  {name:<18}  slope {slope:.2f}   ns per token  {cells}", flush=True)


def measure_admission(run: Run, rng: np.random.Generator, repeats: int) -> None:
    """All prompts at once into a pool that holds them, and each retired in order of admission."""
    print("admission (target: 0.5 s for 10,000 prompts, at most 2.2 times as long as for 5,000)")
    for count in (500, 2_000, 5_000, 10_000):
        sizes = [(int(rng.integers(90, 131)), int(rng.integers(20, 61))) for _ in range(count // 50)]
        prompts = [prompt for length, tail in sizes for prompt in with_tails(rng, 50, length, tail)]
        rng.shuffle(prompts)
        requests = [Request(index, prompt, SamplingParams()) for index, prompt in enumerate(prompts)]
        times: dict[str, list[float]] = {name: [] for name in ("size", "submit", "admit", "retire")}
        for _ in range(repeats):
            pool = KVPool(spec_of_alike(1, 1, 1), pages_needed(requests, 16, most_running=count), 16)
            scheduler = Scheduler(KVStore(pool), Call(), EngineSettings())
            with frozen_heap(requests):  # as in a call
                times["size"] += wall_seconds(lambda to=requests: pages_needed(to, 16))
                times["submit"] += wall_seconds(lambda to=scheduler, given=requests: to.submit(given))
                times["admit"] += wall_seconds(lambda to=scheduler: to.admit(0))
                times["retire"] += wall_seconds(lambda to=scheduler: [to.retire(one) for one in to.in_flight.copy()])
            assert scheduler.idle
        medians = {name: statistics.median(found) for name, found in times.items()}
        cells = "  ".join(f"{name} {median:.3f}" for name, median in medians.items())
        row = {"prompts": count} | {f"{name}_s": median for name, median in medians.items()}
        run.add("admission", row, f"  {count:>6} prompts   {sum(medians.values()):.3f} s   {cells}")


def binary_tree(rng: np.random.Generator, page_size: int, prefix: int) -> tuple[PrefixTree, list[Sequence]]:
    """1,024 leaves below 1,023 inner nodes: ``prefix`` shared tokens, then ten levels of forks, 32 tokens apart."""
    paths = [rng.integers(0, VOCABULARY, prefix)]
    for _ in range(10):
        forks = itertools.product(paths, (0, 1))
        paths = [np.concatenate([path, [branch], rng.integers(0, VOCABULARY, 31)]) for path, branch in forks]
    tree = PrefixTree((prefix + 4_000_000) // page_size, page_size)
    handles = [tree.insert(path.astype(np.int32)) for path in paths]
    mark_all(tree)
    tree.snapshot()
    return tree, handles


def measure_decode(run: Run, rng: np.random.Generator, page_size: int, prefix: int, steps: int) -> None:
    """A decode step; the aim is a median below 2 ms, with steps that take new pages."""
    tree, handles = binary_tree(rng, page_size, prefix)
    parts: dict[str, list[float]] = {"extend_each": [], "mark_computed": [], "snapshot": []}
    for _ in range(steps):
        tokens = rng.integers(0, VOCABULARY, len(handles)).tolist()
        parts["extend_each"] += wall_seconds(lambda t=tokens: tree.extend_each(handles, t))
        nodes = [handle.node for handle in handles]
        computed = [node.length for node in nodes]
        parts["mark_computed"] += wall_seconds(lambda n=nodes, c=computed: tree.mark_computed(n, c))
        parts["snapshot"] += wall_seconds(tree.snapshot)
    parts["step"] = [sum(times) for times in zip(*parts.values(), strict=True)]
    add_step(run, tree, {"case": "decode", "page_size": page_size, "prefix": prefix, "steps": steps}, parts)


def measure_beams(run: Run, rng: np.random.Generator, page_size: int, beams: int, steps: int) -> None:
    """Each step samples its survivors with replacement; ``fill`` is tokens below the prompt / slots of their pages."""
    tree = PrefixTree(4_000_000 // page_size, page_size)
    handles = tree.fork(tree.insert(rng.integers(0, VOCABULARY, 1000)), beams)

    def step() -> None:
        nonlocal handles
        chosen = np.bincount(rng.integers(0, beams, beams), minlength=beams).tolist()
        counted = list(zip(handles, chosen, strict=True))
        kept = [[handle, *(tree.fork(handle, n - 1) if n > 1 else [])] for handle, n in counted if n]
        for handle, n in counted:
            if not n:
                tree.release(handle)
        handles = [handle for each in kept for handle in each]
        tree.extend_each(handles, rng.integers(0, VOCABULARY, beams))
        mark_all(tree)
        tree.snapshot()

    case: Row = {"case": "beams", "page_size": page_size, "prefix": 1000, "steps": steps, "beams": beams}
    times, held = wall_seconds(step, steps), tree.allocator.num_pages - tree.allocator.free
    case["fill"] = (tree.snapshot().num_tokens - 1000) / (held * page_size - 1000)
    add_step(run, tree, case, {"step": times})


def add_step(run: Run, tree: PrefixTree, case: Row, parts: dict[str, list[float]]) -> None:
    """A row with the seconds of the parts of each step."""
    check_tree(tree)
    spreads = {f"{name}_ms": spread([1e3 * seconds for seconds in times]) for name, times in parts.items()}
    case |= {"nodes": tree.snapshot().num_nodes, **spreads}
    what = f"{case['case']}, page {case['page_size']:>3}, prefix {case['prefix']:>6}, {case['nodes']} nodes"
    what += f", fill {case['fill']:.2f}" if "fill" in case else ""
    total = "  ".join(f"{name} {case['step_ms'][name]:.2f}" for name in ("median", "mean", "p99"))
    cells = "  ".join(f"{name} {case[f'{name}_ms']['median']:.2f}" for name in parts if name != "step")
    run.add("steps", case, f"  {what:<46}  {total}   {cells}")


def main() -> None:
    options = arguments(__doc__, repeats=5, steps=400, seed=0)
    run, rng = Run(options, "cpu"), np.random.default_rng(options.seed)
    measure_build(run, rng, options.repeats)
    measure_linearity(run, rng, options.repeats)
    measure_admission(run, rng, options.repeats)
    print("a step's tree work, ms (target: median below 2)")
    for page_size, prefix in [(1, 0), (16, 0), (128, 0), (1, 100_000), (16, 100_000)]:
        measure_decode(run, rng, page_size, prefix, options.steps)
    for beams, page_size in ((16, 1), (1024, 1), (16, 16), (1024, 16)):
        measure_beams(run, rng, page_size, beams, options.steps)
    run.finish()


if __name__ == "__main__":
    main()
