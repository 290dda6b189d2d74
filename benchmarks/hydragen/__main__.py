"""Every experiment of the Hydragen paper (Juravsky et al. 2024) and FlashInfer's parallel generation, on one GPU.

python -m benchmarks.hydragen [--only a,b,c,d,n] [--quick] [--seconds N] [--out DIR]    measure; JSON, figures, report
python -m benchmarks.hydragen --resume RESULTS.json ...                                 what that run had no time for
python -m benchmarks.hydragen --report RESULTS.json                                     figures and report again; no GPU

Results go to DIR/hydragen.json after each row; ``report.toml`` names the experiments; ``--shape tiny`` runs on a CPU.
"""

import argparse
import itertools
import json
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.hydragen import experiments
from benchmarks.hydragen.report import LAYOUT, write
from benchmarks.hydragen.step import Rig, complaints, differences
from benchmarks.runner import OUT_OF_TIME, ROOT, Row, Run, arguments, ceilings, identity
from benchmarks.shapes import SHAPES

LETTERS, NAMES = tuple(LAYOUT["sections"]), ("experiment", "shape", "name")
ORDER = ("CodeLlama-7B", "Llama-3.1-8B", "Yi-6B", "8/1 heads", "CodeLlama-13B")


def main(given: list[str] | None = None) -> None:
    files: Row = {"out": Path("build/hydragen"), "report": {"type": Path}, "docs": ROOT / "docs"}
    chosen: Row = {"only": list(LETTERS), "shape": ",".join(ORDER), "quick": False, "seconds": 0.0, "resume": True}
    options = arguments(__doc__, given, **files, **chosen)
    if options.report:
        print(f"wrote {write(json.loads(options.report.read_text()), options.docs)}")
        return
    options.seconds = options.seconds or (150.0 if options.quick else 440.0)
    folder, options.out = options.out, options.out / "hydragen.json"
    print(f"wrote {options.out}, {write(measure(options), folder)}")  # the report beside the JSON


class Job(NamedTuple):
    """One row of results; see ``jobs.toml``."""

    experiment: str
    shape: str
    name: str
    priority: int
    seconds: float
    run: Callable[[Rig], Row]


def jobs(letters: list[str], shapes: list[str]) -> Iterator[Job]:
    known = tomllib.loads(Path(__file__).with_name("jobs.toml").read_text())["jobs"]
    for letter, shape, of in itertools.product(letters, shapes, known):
        for priority, rows in of["rows"].get(shape, {}).items() if of["experiment"] == letter else ():
            for case in (dict(zip(of["columns"], row, strict=True)) for row in rows):
                run = partial(getattr(experiments, of["run"]), **case)
                yield Job(letter, shape, of["name"].format(**case), int(priority), of["seconds"], run)


def run_jobs(jobs: list[Job], rig_of: Callable[[str], Rig], seconds: float, done: Callable[[Job, Row], None]) -> None:
    """Do the jobs, shape after shape so that one model is in memory; a job that does not begin in time says so.

    A shape's share of the time is by what its jobs are expected to take; what it leaves goes to those after it.
    """
    end, shapes = time.monotonic() + seconds, list(dict.fromkeys(job.shape for job in jobs))
    for index, shape in enumerate(shapes):
        of_shape = sorted((job for job in jobs if job.shape == shape), key=lambda job: job.priority)
        waiting = sum(job.seconds for job in jobs if job.shape in shapes[index:])
        share = sum(job.seconds for job in of_shape) / max(waiting, 1e-9)
        mine = time.monotonic() + (end - time.monotonic()) * share
        rig = rig_of(shape) if mine > time.monotonic() else None
        try:
            for job in of_shape:
                began = time.monotonic()
                late = rig is None or mine <= began
                row = {"skipped": OUT_OF_TIME} if late else rig.attempt(partial(job.run, rig))
                done(job, row | {"seconds": round(time.monotonic() - began, 2)})
        finally:
            if rig is not None:
                rig.drop("arena", "model", "_compiled")


def measure(options: argparse.Namespace) -> Row:
    """Do the jobs and return what is in the JSON."""
    shapes = options.shape.split(",")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and shapes != ["tiny"]:
        raise SystemExit("no CUDA device: on a CPU only --shape tiny runs")
    run = Run(options, device.type)
    run.result |= {"ceilings": ceilings() if device.type == "cuda" else {}, "checks": {}, "rows": []}
    there = run.taken_up("rows", NAMES, beside=("checks",))
    asked = [job for job in jobs(options.only, shapes) if not options.quick or job.priority == 1]
    left = [job for job in asked if identity(job._asdict(), NAMES) not in there]

    def rig_of(shape: str) -> Rig:
        rig = Rig(SHAPES[shape], device)
        run.result["checks"][shape] = found = differences(rig)
        rig.wrong = complaints(found)
        print(f"{shape}: difference from ours {found}", flush=True)
        return rig

    def done(job: Job, row: Row) -> None:
        row = {name: getattr(job, name) for name in NAMES} | row
        text = f"{len(run.result['rows']) + 1:3d}/{len(asked)} ({job.experiment}) {job.shape:13s} {job.name:28s}"
        shown = {name: row[name] for name in ("skipped", "floor_ms", "aim_ms", "step_ms", "ours") if name in row}
        shown |= {name: found.get("step_ms", found.get("skipped")) for name, found in row.get("methods", {}).items()}
        run.add("rows", row, " | ".join([f"{text} {row['seconds']:6.1f} s", *(f"{n} {x}" for n, x in shown.items())]))

    run_jobs(sorted(left, key=lambda job: shapes.index(job.shape)), rig_of, options.seconds, done)
    run.finish()
    return run.result


if __name__ == "__main__":
    main()
