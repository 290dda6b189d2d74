"""Random deep trees on one GPU: attention by our plan and by our own plan that shares no node, in turns.

    python -m benchmarks.deep_trees [--count 200] [--only TEXT] [--seconds 240] [--seed 0] --out FILE

Combs of 64 to 4,096 leaves with 1 to 64 tokens a node, and trees of beam searches of 2,000 steps (``tree_of`` in
prefixkit/testing/named_trees.py).  ``ratio``: time over that without sharing; above 1, sharing costs time.
``--only``: part of a name.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.runner import Replay, Row, Run, arguments, geomean, in_turns
from benchmarks.tree_attention.inputs import GPU, Inputs, Pool, make, ours, planner_for
from benchmarks.tree_attention.workloads import HEADS, Workload
from prefixkit.attention.bsr import decompose_unchecked
from prefixkit.attention.gpu.gpu_plan import Plan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import build_step
from prefixkit.backends.cuda.device_planner import CudaPlanner
from prefixkit.testing.named_trees import tree_of

MOST_TOKENS = 12_000_000  # tokens that all queries see together: reading them without sharing takes some 12 ms
TURNS = 3


class Unshared(CudaPlanner):
    """Plans in which each query reads all of its KV by itself."""

    def specify(self, tree: StepTree) -> Plan:
        none = np.zeros(tree.snapshot.num_nodes, dtype=bool)
        return self._plan_of(tree, [decompose_unchecked(tree, self.shape, self.cost, none)])


def names(count: int, seed: int) -> list[str]:
    """The names of ``count`` random trees; three in four are combs."""
    rng = np.random.default_rng(seed)
    found: list[str] = []
    while len(found) < count:
        prefix = int(2 ** rng.uniform(4, 12))
        if len(found) % 4 == 3:
            found.append(f"beams b{int(2 ** rng.uniform(1, 7))} p{prefix} n2000")
            continue
        leaves, tokens, own = (int(2 ** rng.uniform(*of)) for of in ((6, 12), (0, 6), (0, 6)))
        if leaves * (prefix + leaves * tokens // 2 + own) <= MOST_TOKENS:
            found.append(f"spine p{prefix} d{leaves} t1-{tokens} s1-{own}")
    return found


def without_sharing(inputs: Inputs) -> Callable[[int], Tensor]:
    """The same step by :class:`Unshared`."""
    of = inputs.workload
    planner: Any = planner_for(of.heads, of.kv_heads, of.head_dim, GPU, inputs.q[0].dtype)
    tree, tokens = StepTree(of.snapshot, of.queries), np.zeros(of.queries.num_rows, dtype=np.int64)
    step = build_step(tree, tokens, tokens[:0], Unshared(planner.shape, planner.gpu, planner.num_sms), GPU)
    apart = Inputs(of, inputs.q, inputs.k, inputs.v, inputs.page_order, step, 0.0)
    return partial(ours, apart)


def measured(workload: Workload, pool: Pool) -> Row:
    inputs = make(workload, pool)
    ways = {"us": partial(ours, inputs), "unshared_us": without_sharing(inputs)}
    difference = float((ways["us"](0).float() - ways["unshared_us"](0).float()).abs().max())
    assert difference < 0.05, (str(workload), difference)
    replays = {name: Replay(run, inputs.sets) for name, run in ways.items()}
    times = in_turns({name: partial(one.us, 3) for name, one in replays.items()}, TURNS)
    row: Row = {name: round(float(np.median(found)), 2) for name, found in times.items()}
    row |= {"floor_us": round(workload.floor_us, 2), "nodes": workload.snapshot.num_nodes, "difference": difference}
    return row | {"ratio": round(row["us"] / row["unshared_us"], 3)}


def main() -> None:
    options = arguments(__doc__, count=200, only="", seed=0, seconds=240.0)
    run = Run(options)
    wanted = {at: name for at, name in enumerate(names(options.count, options.seed)) if options.only in name}
    with ProcessPoolExecutor() as workers:  # before this process has a GPU
        trees = workers.map(tree_of, wanted.values(), chunksize=4)
        pool = Pool()
        for (number, name), snapshot in zip(wanted.items(), trees, strict=True):
            if run.left <= 0:
                break
            heads = HEADS[number % len(HEADS)]
            row: Row = {"heads": [*heads], "tree": name} | measured(Workload(name, *heads, snapshot), pool)
            run.add(
                "trees", row, f"{heads[0]}/{heads[1]} {name:36s} {row['us']:9.1f} us, {row['ratio']:.3f} of unshared"
            )
    ratios = [row["ratio"] for row in run.result["trees"]]
    run.result["summary"] = {"trees": len(ratios), "geomean": round(geomean(ratios), 3), "most": max(ratios)}
    run.result["summary"] |= {"above 1.03": [row["tree"] for row in run.result["trees"] if row["ratio"] > 1.03]}
    run.finish("summary", "seconds")


if __name__ == "__main__":
    main()
