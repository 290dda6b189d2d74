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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[2]
LETTERS = "abcdn"
FULL_SECONDS, QUICK_SECONDS = 440.0, 150.0
ORDER = ("CodeLlama-7B", "Llama-3.1-8B", "Yi-6B", "8/1 heads", "CodeLlama-13B")


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    if options.report:
        from benchmarks.hydragen.report import write

        print(f"wrote {write(json.loads(options.report.read_text()), options.docs)}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    result = measure(options)
    from benchmarks.hydragen.report import write

    # Where both are wanted: the report beside the JSON.
    print(f"wrote {options.out / 'hydragen.json'}, {write(result, options.out)}")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hydragen", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(LETTERS), help="letters of experiments, with commas between")
    parser.add_argument("--quick", action="store_true", help="the most important rows only")
    parser.add_argument(
        "--seconds", type=float, help=f"begin no rows after so long; {FULL_SECONDS:.0f}, quick {QUICK_SECONDS:.0f}"
    )
    parser.add_argument("--shape", default="", help="model shapes, with commas between; tiny runs on a CPU")
    parser.add_argument("--document", type=Path, help="text for (c) instead of words at random")
    parser.add_argument("--out", type=Path, default=Path("build/hydragen"), help="folder for JSON, figures and report")
    parser.add_argument(
        "--report", type=Path, metavar="RESULTS.json", help="write figures and report of these into --docs"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="RESULTS.json", help="keep what these have, and measure the rest"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args(arguments)
    options.only = [letter.strip() for letter in options.only.split(",")]
    if unknown := set(options.only) - set(LETTERS):
        parser.error(f"--only takes some of {', '.join(LETTERS)}, got {', '.join(sorted(unknown))}")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Do the jobs and return what is in the JSON."""
    import torch

    from benchmarks.hydragen.checks import complaints, differences
    from benchmarks.hydragen.jobs import Job, Row, run_jobs
    from benchmarks.hydragen.shapes import SHAPES
    from benchmarks.hydragen.step import Rig

    shapes = options.shape.split(",") if options.shape else list(ORDER)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and shapes != ["tiny"]:
        raise SystemExit("no CUDA device: on a CPU only --shape tiny runs")
    seconds = options.seconds or (QUICK_SECONDS if options.quick else FULL_SECONDS)
    began = time.monotonic()
    result: dict[str, Any] = {
        **_machine(device),
        "options": {"only": options.only, "quick": options.quick, "seconds": seconds, "shapes": shapes},
        "seconds_before": 0.0,
        "checks": {},
        "rows": [],
    }
    jobs = _jobs(options, shapes)
    if options.resume:
        jobs = _take_up(result, json.loads(options.resume.read_text()), jobs)
    console = Console(width=200)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=len(jobs))

        def begin_shape(rig: Rig) -> None:
            progress.update(task, description=rig.shape.name)
            result["checks"][rig.shape.name] = found = differences(rig)
            rig.wrong = complaints(found)
            progress.console.print(f"{rig.shape.name}: difference from ours {found}", highlight=False, soft_wrap=True)

        def done(job: Job, row: Row) -> None:
            result["rows"].append({"experiment": job.experiment, "shape": job.shape, "name": job.name, **row})
            result["seconds"] = round(result["seconds_before"] + time.monotonic() - began, 1)
            (options.out / "hydragen.json").write_text(json.dumps(result, indent=1) + "\n")
            progress.console.print(line(result["rows"][-1]), highlight=False, soft_wrap=True)
            progress.advance(task)

        run_jobs(jobs, lambda name: Rig(SHAPES[name], device), seconds, done, begin_shape)
    return result


def _jobs(options: argparse.Namespace, shapes: list[str]) -> list[Any]:
    from benchmarks.hydragen import documents, grid, parallel, problems, throughput

    of_letter: dict[str, Callable[[], list[Any]]] = {
        "a": lambda: throughput.jobs(shapes),
        "b": lambda: grid.jobs(shapes),
        "c": lambda: documents.jobs(shapes, options.document),
        "d": lambda: problems.jobs(shapes),
        "n": lambda: parallel.jobs(shapes),
    }
    found = [job for letter in options.only for job in of_letter[letter]()]
    found = [job for job in found if not options.quick or job.priority == 1]
    return sorted(found, key=lambda job: shapes.index(job.shape))


def _take_up(result: dict[str, Any], before: dict[str, Any], jobs: list[Any]) -> list[Any]:
    """Copy the rows that an earlier run on the same kind of machine has; returns the jobs that are left."""
    if before["machine"] != result["machine"]:
        raise SystemExit(f"those results are of another machine: {before['machine']}, this is {result['machine']}")
    result["rows"] = [row for row in before["rows"] if row.get("skipped") != "out of time"]
    result["checks"], result["seconds_before"] = before["checks"], before["seconds"]
    there = {(row["experiment"], row["shape"], row["name"]) for row in result["rows"]}
    return [job for job in jobs if (job.experiment, job.shape, job.name) not in there]


def _machine(device: Any) -> dict[str, Any]:
    if device.type == "cpu":
        return {"machine": {"gpu": "none", "torch": __import__("torch").__version__}, "ceilings": {}}
    from benchmarks.tree_attention.timing import ceilings, machine

    return {"machine": machine(), "ceilings": ceilings()}


def line(row: dict[str, Any]) -> str:
    """A row in one line."""
    text = f"({row['experiment']}) {row['shape']:13s} {row['name']:28s} {row.get('seconds', 0):6.1f} s"
    if "skipped" in row:
        return f"{text} | {row['skipped']}"
    if "methods" in row:
        text += f" | floor {row['floor_ms']:.2f}" + (f", aim {row['aim_ms']:.2f}" if "aim_ms" in row else "")
        for name, found in row["methods"].items():
            text += f" | {name} " + (f"{found['step_ms']:.2f}" if "step_ms" in found else found["skipped"])
    elif row["kind"] == "engine" and "ours" in row:
        text += f" | {row['ours']['tokens_per_s']:,.0f} tokens/s, {row['ours']['seconds']:.2f} s"
    elif "step_ms" in row:
        text += f" | step {row['step_ms']:.2f} ms"
    elif row["kind"] == "grid":
        text += f" | {len(row['points'])} points"
    return text


if __name__ == "__main__":
    main()
