"""Every experiment of the Hydragen paper (Juravsky et al. 2024) and FlashInfer's parallel generation, on one GPU.

python -m benchmarks.hydragen [--only a,b,c,d,n] [--quick] [--seconds N] [--out DIR]    measure, write JSON, figures, report
python -m benchmarks.hydragen --resume RESULTS.json ...                                 only what that run had no time for
python -m benchmarks.hydragen --report RESULTS.json                                     figures and report again; no GPU

(a) decoding throughput  (b) one layer's attention  (c) questions about a long document  (d) two-level sharing
(n) parallel generation.  Results go to DIR/hydragen.json after each row; the report to DOCS/hydragen.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.hydragen.experiments import LETTERS, Job, jobs, run_jobs
from benchmarks.hydragen.report import write
from benchmarks.hydragen.step import Rig, complaints, differences
from benchmarks.runner import ROOT, Row, Run, arguments, ceilings, identity
from benchmarks.shapes import SHAPES

NAMES = ("experiment", "shape", "name")
FULL_SECONDS, QUICK_SECONDS = 440.0, 150.0
ORDER = ("CodeLlama-7B", "Llama-3.1-8B", "Yi-6B", "8/1 heads", "CodeLlama-13B")


def main(given: list[str] | None = None) -> None:
    options = _options(given)
    if options.report:
        print(f"wrote {write(json.loads(options.report.read_text()), options.docs)}")
        return
    folder = options.out
    options.out = folder / "hydragen.json"
    result = measure(options)
    # Where both are wanted: the report beside the JSON.
    print(f"wrote {options.out}, {write(result, folder)}")


def _options(given: list[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, seconds=0.0, resume=True, out=Path("build/hydragen"))
    parser.prog = "python -m benchmarks.hydragen"
    parser.add_argument("--only", default=",".join(LETTERS), help="letters of experiments, with commas between")
    parser.add_argument("--quick", action="store_true", help="the most important rows only")
    parser.add_argument("--shape", default="", help="model shapes, with commas between; tiny runs on a CPU")
    parser.add_argument(
        "--report", type=Path, metavar="RESULTS.json", help="write their figures and report into --docs"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args(given)
    options.only = [letter.strip() for letter in options.only.split(",")]
    if unknown := set(options.only) - set(LETTERS):
        parser.error(f"--only takes some of {', '.join(LETTERS)}, got {', '.join(sorted(unknown))}")
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else FULL_SECONDS)
    return options


def measure(options: argparse.Namespace) -> Row:
    """Do the jobs and return what is in the JSON."""
    shapes = options.shape.split(",") if options.shape else list(ORDER)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and shapes != ["tiny"]:
        raise SystemExit("no CUDA device: on a CPU only --shape tiny runs")
    run = Run(options, device.type)
    run.result |= {"ceilings": ceilings() if device.type == "cuda" else {}, "checks": {}, "rows": []}
    there = run.taken_up("rows", NAMES, beside=("checks",))
    asked = [job for letter in options.only for job in jobs(letter, shapes) if not options.quick or job.priority == 1]
    left = [job for job in asked if identity(vars(job), NAMES) not in there]

    def begin_shape(rig: Rig) -> None:
        run.result["checks"][rig.shape.name] = found = differences(rig)
        rig.wrong = complaints(found)
        print(f"{rig.shape.name}: difference from ours {found}", flush=True)

    def done(job: Job, row: Row) -> None:
        row = {name: getattr(job, name) for name in NAMES} | row
        run.add("rows", row, f"{len(run.result['rows']) + 1:3d}/{len(asked)} {line(row)}")

    left.sort(key=lambda job: shapes.index(job.shape))
    run_jobs(left, lambda name: Rig(SHAPES[name], device), options.seconds, done, begin_shape)
    run.finish()
    return run.result


def line(row: Row) -> str:
    """A row in one line."""
    text = f"({row['experiment']}) {row['shape']:13s} {row['name']:28s} {row.get('seconds', 0):6.1f} s"
    shown = {name: row[name] for name in ("skipped", "floor_ms", "aim_ms", "step_ms", "ours") if name in row}
    shown |= {name: found.get("step_ms", found.get("skipped")) for name, found in row.get("methods", {}).items()}
    return " | ".join([text, *(f"{name} {value}" for name, value in shown.items())])


if __name__ == "__main__":
    main()
