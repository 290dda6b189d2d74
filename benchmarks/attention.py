"""Tree attention on one GPU: 87 decode workloads against their floors, rivals in the same run and recorded anchors.

python benchmarks/attention.py [--only TEXT] [--rivals NAMES] [--out FILE]    the 87 workloads
python benchmarks/attention.py --scales | --prefill                           larger trees; prompts instead of single tokens
python benchmarks/attention.py --plot RESULTS.json PICTURE.svg                no GPU needed

CUDA-graph replay, median, inputs rotated past the L2.  Layouts that a rival wants are made before its clock starts, and its
answer is compared with ours once.  Anchors (benchmarks/anchors) are other systems' times, recorded before on the same kind of
GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.runner import OUT_OF_TIME, Row, Run, arguments, ceilings, identity, replay_us
from benchmarks.tree_attention import report
from benchmarks.tree_attention.inputs import Inputs, Pool, make, ours
from benchmarks.tree_attention.workloads import DECODE, HEADS, SCALES, workload


def decode(run: Run, options: argparse.Namespace) -> None:
    """A row for each workload: ours, every rival that fits, the recorded anchor, on the same numbers."""
    from benchmarks.tree_attention.rivals import RIVALS, outcome

    known, pool = report.anchors(), Pool()
    rivals = {"all": list(RIVALS), "none": []}.get(options.rivals, options.rivals.split(","))
    there = run.taken_up("workloads", ("heads", "workload"))
    for heads, kv_heads, name in SCALES if options.scales else [(*heads, name) for heads in HEADS for name in DECODE]:
        row: Row = {"heads": [heads, kv_heads], "workload": name}
        if options.only not in f"{heads}/{kv_heads} {name}" or identity(row, ("heads", "workload")) in there:
            continue
        inputs = make(workload(name, heads, kv_heads), pool, options.shuffled)
        row |= {
            "floor_us": round(inputs.workload.floor_us, 2),
            "us": round(replay_us(lambda i, of=inputs: ours(of, i), inputs.sets), 2),
            "plan_ms": round(inputs.plan_ms, 2),
            "input_sets": inputs.sets,
            "rivals": {},
        }
        if anchor := known.get((heads, kv_heads, name)):
            row["anchor"] = {"best": anchor["best"], "us": anchor["best_us"]}
        expected = ours(inputs, 0)
        for rival in rivals:
            prepare: Callable[[Inputs], Callable[[int], torch.Tensor]] = RIVALS[rival]
            timed = (
                outcome(lambda of=inputs, to=prepare: to(of), expected, inputs.sets) if run.left > 0 else OUT_OF_TIME
            )
            row["rivals"][rival] = timed
        run.add("workloads", row, report.line(row))
        del inputs, expected
    rows = run.result.get("workloads", [])
    run.result |= {"summary": report.summary(rows), "skipped": report.skipped(rows)}
    if options.before:
        run.result["faster than before"] = report.compare(json.loads(options.before.read_text())["workloads"], rows)


def main() -> None:
    parser = arguments(__doc__, seconds=240.0, resume=True)
    parser.add_argument("--only", default="", help="workloads whose name, heads first, contains this")
    parser.add_argument("--rivals", default="all", help="names with commas between; all; none")
    parser.add_argument("--scales", action="store_true", help="up to 32,768 leaves, 1M tokens, chains, combs")
    parser.add_argument("--prefill", action="store_true", help="prompts of 4K to 128K tokens, chunks, shared prefixes")
    parser.add_argument("--shuffled", action="store_true", help="strew the tree's pages over the pool")
    parser.add_argument("--before", type=Path, help="an earlier run's JSON, to compare with")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("RESULTS", "PICTURE"))
    options = parser.parse_args()
    if options.plot:
        report.plot(*options.plot)
        return
    run = Run(options)
    run.result["ceilings"] = ceilings()
    print(json.dumps(run.result["machine"]), json.dumps(run.result["ceilings"]), flush=True)
    if options.prefill:
        from benchmarks.tree_attention import prefill

        prefill.measure(run, options.only)
    else:
        decode(run, options)
    run.finish("faster than before", "summary", "skipped", "seconds")


if __name__ == "__main__":
    main()
