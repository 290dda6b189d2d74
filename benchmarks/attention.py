"""Tree attention on one GPU: 87 decode workloads against their floors, rivals in the same run and recorded anchors.

python -m benchmarks.attention [--only TEXT] [--rivals NAMES] [--before EARLIER.json] [--out FILE]    the 87 workloads
python -m benchmarks.attention --scales | --deep | --groups         larger trees; deep ones; other groups and head sizes
python -m benchmarks.attention --e4m3                               own tokens in e4m3, compared with bfloat16
python -m benchmarks.attention --prefill                            prompts, not single tokens
python -m benchmarks.attention --plot RESULTS.json PICTURE.svg                no GPU needed

``--only``: part of a name, which starts with the heads; ``--rivals``: names with commas, all or none; ``--shuffled``:
pages in random order.
"""

import argparse
import json
from collections import Counter, defaultdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.runner import OUT_OF_TIME, Row, Run, arguments, ceilings, geomean, identity, replay_us
from benchmarks.tree_attention import prefill
from benchmarks.tree_attention.inputs import Pool, captured_plan_us, in_e4m3, make, ours
from benchmarks.tree_attention.rivals import RIVALS, outcome
from benchmarks.tree_attention.workloads import DECODE, DEEP, GROUPS, HEADS, OWN, SCALES, workload


@cache
def anchors() -> dict[tuple[int, int, str], Row]:
    """Recorded times of other systems, by query heads, KV heads and workload."""
    path = Path(__file__).with_name("anchors") / "h200_decode_attention.json"
    return {(w["q_heads"], w["kv_heads"], w["workload"]): w for w in json.loads(path.read_text())["workloads"]}


def best_rival(row: Row) -> tuple[str, float] | None:
    timed = {name: us for name, us in row["rivals"].items() if isinstance(us, int | float)}
    return min(timed.items(), key=lambda item: item[1]) if timed else None


def line(row: Row) -> str:
    us = row["us"]
    text = f"{name_of(row):34s} {us:9.1f} us = {us / row['floor_us']:6.2f} floors of {row['floor_us']:8.1f}"
    if rival := best_rival(row):
        text += f" | {rival[0]:18s} {rival[1]:9.1f} {rival[1] / us:5.2f}x"
    if "share" in row:
        text += f" of share {row['share']:.2f}"
    if anchor := row.get("anchor"):
        text += f" | anchor {anchor['best']:12s} {anchor['us']:8.1f} {anchor['us'] / us:5.2f}x"
    if "e4m3_us" in row:
        text += f" | e4m3 {row['e4m3_us']:.1f} us = {row['e4m3_us'] / us:.2f} of that"
    text += f" | plan {row['plan_ms']:.1f} ms"
    return text + (f", {row['plan_us']:.0f} us in a graph" if "plan_us" in row else "")


def summary(rows: list[Row]) -> dict[str, Any]:
    """Geometric means, and the workloads on which ours is slower."""
    result: dict[str, Any] = {"workloads": len(rows)}
    anchors = [(row["anchor"]["us"] / row["us"], name_of(row)) for row in rows if "anchor" in row]
    rivals = [(best[1] / row["us"], name_of(row)) for row in rows if (best := best_rival(row))]
    for what, ratios in (("anchor", anchors), ("rival", rivals)):
        if ratios:
            least, name = min(ratios)
            found = {"geomean": round(geomean(ratio for ratio, _ in ratios), 3), "of": len(ratios)}
            found |= {"ahead": sum(ratio >= 1 for ratio, _ in ratios), "least": [name, round(least, 3)]}
            result[f"best {what} / ours"] = found
    if long := [r["us"] / r["floor_us"] for r in rows if r["floor_us"] > 30.0]:
        result["time / floor, floor above 30 us"] = {"geomean": round(geomean(long), 3), "most": round(max(long), 3)}
    if short := [r["us"] - r["floor_us"] for r in rows if r["floor_us"] < 10.0]:
        found = {"mean": round(sum(short) / len(short), 2), "most": round(max(short), 2)}
        result["us above floor, floor below 10 us"] = found
    return result


def skipped(rows: list[Row]) -> dict[str, dict[str, int]]:
    """The reasons for which rivals did not run, and the number of workloads of each."""
    reasons: dict[str, dict[str, int]] = defaultdict(Counter)
    for name, why in (item for row in rows for item in row["rivals"].items() if isinstance(item[1], str)):
        reasons[name][why if len(why) < 90 else why[:87] + "..."] += 1
    return reasons


def compare(before: list[Row], after: list[Row]) -> dict[str, Any]:
    """Earlier time over later time for each workload that both have."""
    known = {name_of(row): row["us"] for row in before}
    ratios = {name_of(row): round(known[name_of(row)] / row["us"], 3) for row in after if name_of(row) in known}
    ordered = dict(sorted(ratios.items(), key=lambda item: item[1]))
    return {"geomean": round(geomean(ordered.values()), 3), "each": ordered} if ordered else {}


def name_of(row: Row) -> str:
    """The name of a workload or of prompts, which starts with the heads."""
    return f"{row['heads'][0]}/{row['heads'][1]} {row.get('workload') or row['prompts']}"


def plot(results: Path, picture: Path) -> None:
    """Draw time over floor, ours and the best of the others, into ``picture``; its ending is the format (svg, png)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    found = json.loads(results.read_text())
    rows, nothing = sorted(found["workloads"], key=lambda row: row["floor_us"]), float("nan")
    floors = [row["floor_us"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    left.plot(floors, [row["us"] / row["floor_us"] for row in rows], "o", ms=4, label="prefixkit")
    for label, marker, times in (
        ("best rival in this run", "x", [(best_rival(row) or ("", nothing))[1] for row in rows]),
        ("best recorded anchor", "+", [row.get("anchor", {}).get("us", nothing) for row in rows]),
    ):
        over_floor = [time / row["floor_us"] for time, row in zip(times, rows, strict=True)]
        left.plot(floors, over_floor, marker, ms=5, alpha=0.7, label=label)
        over_ours = [time / row["us"] for time, row in zip(times, rows, strict=True)]
        right.plot(floors, over_ours, marker, ms=5, label=f"{label} / ours")
    right.set_yticks([0.5, 0.7, 1.0, 1.4, 2.0, 3.0])
    for axes, what in ((left, "time / floor"), (right, "their time / ours")):
        axes.set(xscale="log", yscale="log", xlabel="floor, us", ylabel=what)
        axes.axhline(1.0, color="grey", lw=0.8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    ran = found["machine"]
    figure.suptitle(f"tree attention, {len(rows)} workloads, {ran['gpu']}, torch {ran['torch']}, cuDNN {ran['cudnn']}")
    figure.savefig(picture)


def decode(run: Run, options: argparse.Namespace, pool: Pool, heads: int, kv_heads: int, name: str) -> Row:
    """Times of ours, of every rival that fits and the recorded anchor, on the same numbers."""
    inputs = make(workload(name, heads, kv_heads), pool, options.shuffled)
    us = replay_us(partial(ours, inputs), inputs.sets)
    row: Row = {"floor_us": round(inputs.workload.floor_us, 2), "us": round(us, 2)}
    row |= {"plan_ms": round(inputs.plan_ms, 2), "input_sets": inputs.sets, "rivals": {}}
    if options.e4m3:
        row["e4m3_us"] = round(replay_us(partial(ours, in_e4m3(inputs)), inputs.sets), 2)
    if options.deep:
        row["plan_us"] = round(captured_plan_us(inputs.workload), 2)
    if anchor := anchors().get((heads, kv_heads, name)):
        row["anchor"] = {"best": anchor["best"], "us": anchor["best_us"]}
    expected = ours(inputs, 0)
    for rival in {"all": RIVALS, "none": []}.get(options.rivals, options.rivals.split(",")):
        late = run.left <= 0
        row["rivals"][rival] = OUT_OF_TIME if late else outcome(partial(RIVALS[rival], inputs), expected, inputs.sets)
    return row


def measure(run: Run, options: argparse.Namespace) -> None:
    """A row for each workload, or for each of the prompts."""
    key, name = ("prefill", "prompts") if options.prefill else ("workloads", "workload")
    usual = [(*heads, name) for heads in HEADS for name in DECODE]
    lists = {"deep": DEEP, "scales": SCALES, "groups": GROUPS, "e4m3": OWN}
    named = next((of for flag, of in lists.items() if getattr(options, flag)), usual)
    pool, there = Pool(), run.taken_up(key, ("heads", name))
    for heads, kv_heads, of in prefill.PROMPTS if options.prefill else named:
        row: Row = {"heads": [heads, kv_heads], name: of.name if options.prefill else of}
        if options.only not in name_of(row) or identity(row, ("heads", name)) in there:
            continue
        measured = prefill.measure if options.prefill else partial(decode, run, options)
        row |= measured(pool, heads, kv_heads, of)
        run.add(key, row, line(row))
    if not options.prefill:
        rows = run.result.get("workloads", [])
        run.result |= {"summary": summary(rows), "skipped": skipped(rows)}
        if options.before:
            before = json.loads(options.before.read_text())["workloads"]
            run.result["faster than before"] = compare(before, rows)


def main() -> None:
    files: Row = {"before": {"type": Path}, "plot": {"type": Path, "nargs": 2, "metavar": ("RESULTS", "PICTURE")}}
    flags = dict.fromkeys(("scales", "deep", "groups", "e4m3", "prefill", "shuffled"), False)
    options = arguments(__doc__, only="", rivals="all", **flags, **files, seconds=240.0, resume=True)
    if options.plot:
        plot(*options.plot)
        return
    run = Run(options)
    run.result["ceilings"] = ceilings()
    print(json.dumps(run.result["machine"]), json.dumps(run.result["ceilings"]), flush=True)
    measure(run, options)
    run.finish("faster than before", "summary", "skipped", "seconds")


if __name__ == "__main__":
    main()
