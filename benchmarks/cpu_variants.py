"""Variants of attention on one CPU thread: times relative to causal attention with the same plan, in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_variants --out benchmarks/results/cpu_variants.json

CPU time of one layer in float32, with its plan, and the masks and biases that layers share, made before.  Variants run
in turns in a random order, each after a pass of causal attention, so that all find the same caches.  The result is the
median of each variant's time over that of the causal pass after it.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.runner import Row, Run, arguments
from prefixkit import variants
from prefixkit.attention.queries import Queries
from prefixkit.attention.sharing import CPU_COST
from prefixkit.attention.variants import CAUSAL, Variant, variant
from prefixkit.testing.forests import Case, fill, make_snapshot, plan_of, program_of, run_on

HEADS = 8, 2, 64
TREES = {  # parents and lengths; whole prompts, or the last token of each leaf
    "1 prompt of 1,024": ([-1], [1024]),
    "1 prompt of 4,096": ([-1], [4096]),
    "8 decode rows on 1,024 each": ([-1] * 8, [1024] * 8),
    "32 decode rows that share 1,024": ([-1] + [0] * 32, [1024] + [64] * 32),
}


def contenders() -> dict[str, Variant]:
    table, slopes = torch.rand(HEADS[0], 4096), torch.rand(HEADS[0])
    return {
        "causal again": CAUSAL,
        "sliding window of 8,192": variants.sliding_window(8192),
        "documents": variants.document(torch.randint(0, 2, (4096,))),
        "a mask by head": variant(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & ((kv_idx + h) % 7 != 3)),
        "ALiBi": variants.alibi(slopes),
        "a table of biases": variant(lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx]),
        "soft-cap": variants.soft_cap(20.0),
        "sigmoid": variant(lambda score, b, h, q_idx, kv_idx: 4 * torch.sigmoid(score)),
    }


def case_of(tree: str) -> Case:
    parents, lengths = TREES[tree]
    rng = np.random.default_rng(0)
    snapshot, pages = make_snapshot(rng, parents, lengths, 16, orderly=True)
    leaf = np.flatnonzero(snapshot.subtree_end == np.arange(len(parents)) + 1).astype(np.int32)
    end = snapshot.length[leaf]
    queries = Queries(leaf, np.zeros_like(end) if "prompt" in tree else end - 1, end, leaf)
    return fill(rng, snapshot, pages, queries, HEADS, torch.float32)


def milliseconds(run: Callable[[], object]) -> float:
    """CPU time of a call, since a busy machine disturbs CPU time less than wall time."""
    began = time.process_time()
    run()
    return 1e3 * (time.process_time() - began)


def measure(tree: str, turns: int, seconds: float) -> Row:
    case, of = case_of(tree), contenders()
    plan, rng = plan_of(case, CPU_COST), np.random.default_rng(0)
    programs = {name: program_of(case, plan, each) for name, each in of.items()}
    causal = partial(run_on, case, programs["causal again"])
    base: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in of}
    began = time.perf_counter()
    for turn in range(turns):
        for name in rng.permutation([*of]).tolist():
            causal()  # after it, the caches are the same for all
            base.append(milliseconds(causal))
            found[name].append(milliseconds(partial(run_on, case, programs[name], of[name])) / base[-1])
        if turn > 4 and time.perf_counter() - began > seconds:
            break
    return {
        "tree": tree,
        "causal_ms": round(statistics.median(base), 3),
        "turns": len(found["causal again"]),
        "over_causal": {name: round(statistics.median(ratios), 3) for name, ratios in found.items()},
    }


def main() -> None:
    options = arguments(__doc__, trees=list(TREES), turns=200, seconds=30.0)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = Run(options, "cpu")
    for tree in options.trees:
        run.add("variants", measure(tree, options.turns, options.seconds))
    run.finish()


if __name__ == "__main__":
    main()
