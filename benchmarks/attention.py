"""Tree attention on one GPU: 87 decode workloads against their floors, rivals in the same run and recorded anchors.

python -m benchmarks.attention [--only TEXT] [--rivals NAMES] [--out FILE]    the 87 workloads
python -m benchmarks.attention --scales | --prefill                           larger trees; prompts, not single tokens
python -m benchmarks.attention --plot RESULTS.json PICTURE.svg                no GPU needed

``--only`` is part of a name, heads first; ``--rivals`` names with commas between, all or none; ``--shuffled`` strews
pages over the pool; ``--before`` compares with an earlier JSON.
"""

import argparse
import json
from functools import partial
from pathlib import Path

from benchmarks.runner import OUT_OF_TIME, Row, Run, arguments, ceilings, identity, replay_us
from benchmarks.tree_attention import prefill, report
from benchmarks.tree_attention.inputs import Pool, make, ours
from benchmarks.tree_attention.rivals import RIVALS, outcome
from benchmarks.tree_attention.workloads import DECODE, HEADS, SCALES, workload


def decode(run: Run, options: argparse.Namespace, pool: Pool, heads: int, kv_heads: int, name: str) -> Row:
    """Ours, every rival that fits and the recorded anchor, on the same numbers."""
    inputs = make(workload(name, heads, kv_heads), pool, options.shuffled)
    us = replay_us(partial(ours, inputs), inputs.sets)
    row: Row = {"floor_us": round(inputs.workload.floor_us, 2), "us": round(us, 2)}
    row |= {"plan_ms": round(inputs.plan_ms, 2), "input_sets": inputs.sets, "rivals": {}}
    if anchor := report.anchors().get((heads, kv_heads, name)):
        row["anchor"] = {"best": anchor["best"], "us": anchor["best_us"]}
    expected = ours(inputs, 0)
    for rival in {"all": RIVALS, "none": []}.get(options.rivals, options.rivals.split(",")):
        late = run.left <= 0
        row["rivals"][rival] = OUT_OF_TIME if late else outcome(partial(RIVALS[rival], inputs), expected, inputs.sets)
    return row


def measure(run: Run, options: argparse.Namespace) -> None:
    """A row for each workload, or for each of the prompts."""
    key, name = ("prefill", "prompts") if options.prefill else ("workloads", "workload")
    named = SCALES if options.scales else [(*heads, name) for heads in HEADS for name in DECODE]
    pool, there = Pool(), run.taken_up(key, ("heads", name))
    for heads, kv_heads, of in prefill.PROMPTS if options.prefill else named:
        row: Row = {"heads": [heads, kv_heads], name: str(of)}
        if options.only not in report.name_of(row) or identity(row, ("heads", name)) in there:
            continue
        measured = prefill.measure if options.prefill else partial(decode, run, options)
        row |= measured(pool, heads, kv_heads, of)
        run.add(key, row, report.line(row))
    if not options.prefill:
        rows = run.result.get("workloads", [])
        run.result |= {"summary": report.summary(rows), "skipped": report.skipped(rows)}
        if options.before:
            before = json.loads(options.before.read_text())["workloads"]
            run.result["faster than before"] = report.compare(before, rows)


def main() -> None:
    files: Row = {"before": {"type": Path}, "plot": {"type": Path, "nargs": 2, "metavar": ("RESULTS", "PICTURE")}}
    flags = dict.fromkeys(("scales", "prefill", "shuffled"), False)
    options = arguments(__doc__, only="", rivals="all", **flags, **files, seconds=240.0, resume=True)
    if options.plot:
        report.plot(*options.plot)
        return
    run = Run(options)
    run.result["ceilings"] = ceilings()
    print(json.dumps(run.result["machine"]), json.dumps(run.result["ceilings"]), flush=True)
    measure(run, options)
    run.finish("faster than before", "summary", "skipped", "seconds")


if __name__ == "__main__":
    main()
