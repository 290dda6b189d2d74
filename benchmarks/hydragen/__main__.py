"""Decode steps as in the Hydragen paper (Juravsky et al. 2024) and FlashInfer's parallel generation, on one GPU.

python -m benchmarks.hydragen [--only a,c,d,n] [--quick] [--seconds N] [--out DIR]    measure; JSON and report
python -m benchmarks.hydragen --resume RESULTS.json ...                               what that run had no time for
python -m benchmarks.hydragen --report RESULTS.json                                   the report again; no GPU

Results go to DIR/hydragen.json after each row; ``jobs.toml`` lists them; ``--shape tiny`` runs on a CPU.
"""

import itertools
import json
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.hydragen.experiments import CASES, Rig, differences, steps
from benchmarks.hydragen.report import write
from benchmarks.runner import OUT_OF_TIME, ROOT, Row, Run, arguments, ceilings, free_memory, identity
from benchmarks.shapes import SHAPES

TABLE, NAMES = tomllib.loads(Path(__file__).with_name("jobs.toml").read_text()), ("experiment", "shape", "name")
ORDER = ("CodeLlama-7B", "Llama-3.1-8B", "Yi-6B", "CodeLlama-13B")


def main(given: list[str] | None = None) -> None:
    files: Row = {"out": Path("build/hydragen"), "report": {"type": Path}, "docs": ROOT / "docs" / "measured"}
    chosen: Row = {"only": list(TABLE), "shape": ",".join(ORDER), "quick": False, "seconds": 0.0, "resume": True}
    options = arguments(__doc__, given, **files, **chosen)
    if options.report:
        print(f"wrote {write(json.loads(options.report.read_text()), options.docs)}")
        return
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and options.shape != "tiny":
        raise SystemExit("no CUDA device: on a CPU only --shape tiny runs")
    options.seconds = options.seconds or (150.0 if options.quick else 440.0)
    folder, options.out = options.out, options.out / "hydragen.json"
    run = Run(options, device.type)
    run.result |= {"ceilings": ceilings() if device.type == "cuda" else {}, "checks": {}, "rows": []}
    there = run.taken_up("rows", NAMES, beside=("checks",))
    asked = [row for row in jobs(options.only, options.shape.split(",")) if row["priority"] == 1 or not options.quick]

    def rig_of(shape: str) -> Rig:
        rig = Rig(SHAPES[shape], device)
        run.result["checks"][shape] = found = differences(rig)
        print(f"{shape}: difference from ours {found}", flush=True)
        return rig

    def done(row: Row) -> None:
        text = " ".join(row[name] for name in NAMES)
        shown = {name: found.get("step_ms", found.get("skipped")) for name, found in row.get("methods", {}).items()}
        shown |= {name: row[name] for name in ("skipped", "floor_ms", "seconds") if name in row}
        run.add("rows", row, f"{len(run.result['rows']) + 1:3d}/{len(asked)} {text}: {shown}")

    run_jobs([row for row in asked if identity(row, NAMES) not in there], rig_of, options.seconds, done)
    run.finish()
    print(f"wrote {options.out}, {write(run.result, folder)}")  # the report beside the JSON


def jobs(letters: list[str], shapes: list[str]) -> Iterator[Row]:
    """Rows of ``jobs.toml`` without their results."""
    for shape, letter in itertools.product(shapes, letters):
        of = TABLE[letter]
        for priority, given in ((int(at), given) for at, rows in of.get(shape, {}).items() for given in rows):
            row = {"experiment": letter, "shape": shape, "name": of["name"].format(*given), "priority": priority}
            yield row | {"run": partial(steps, case=CASES[letter](*given), names=of["methods"])}


def run_jobs(jobs: list[Row], rig_of: Callable[[str], Rig], seconds: float, done: Callable[[Row], None]) -> None:
    """Do the jobs, shape after shape so that only one model is in memory; a job that could not begin in time says so.

    A shape's share of the time is proportional to its number of jobs; time that it leaves goes to later shapes.
    """
    end = time.monotonic() + seconds
    while jobs:
        of_shape = [job for job in jobs if job["shape"] == jobs[0]["shape"]]
        mine = time.monotonic() + (end - time.monotonic()) * len(of_shape) / len(jobs)
        jobs = [job for job in jobs if job["shape"] != jobs[0]["shape"]]
        rig = rig_of(of_shape[0]["shape"]) if mine > time.monotonic() else None
        for job in sorted(of_shape, key=lambda job: job["priority"]):
            began, run = time.monotonic(), partial(job.pop("run"), rig)
            row = rig.attempt(run) if rig and mine > began else {"skipped": OUT_OF_TIME}
            done(job | row | {"seconds": round(time.monotonic() - began, 2)})
        rig = run = None
        free_memory()


if __name__ == "__main__":
    main()
