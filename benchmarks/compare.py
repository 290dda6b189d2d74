"""Two checkouts of prefixkit in one run: each case is timed in both, in turns, and the ratio of new to old is printed.

    git archive bacee24 --prefix=build/old/ | tar x        # once; build/ is ignored by git
    python -m benchmarks.compare --old build/old [--new .] [--cases attention,engine,calls,tree] [--out FILE]

Each checkout has a process (``compare_server.py``).  CPU times depend on the addresses of a process's memory, so both
processes are started anew every ``--fresh`` turns; on a GPU, where preparing takes long, each has one process for all
cases.  Below 1.00 the new checkout is faster.  ``--only``: part of a name.
"""

import json
import os
import statistics
import subprocess
import sys
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import ROOT, Row, Run, arguments, geomean, identity, in_turns, table
from benchmarks.tree_attention.workloads import DECODE, HEADS
from benchmarks.whole_calls import OF_SHAPE

NAMES = ("kind", "name")
ON_GPU = ("attention", "engine", "whole", "calls")  # where there is one


class Failed(RuntimeError):
    """A checkout could not run a case; the message says which and why."""


class Checkout:
    """A process in which one checkout's prefixkit is imported; SystemExit if the folder is no checkout."""

    def __init__(self, name: str, folder: Path) -> None:
        if not (folder / "prefixkit" / "__init__.py").exists():
            raise SystemExit(f"--{name} takes a checkout of prefixkit, got {folder}; export one: see --help")
        self.name, self._folder = name, folder.resolve()
        self.start()

    def start(self) -> None:
        """Start a new process; :meth:`close` ends it."""
        self._pipe, theirs = Pipe()
        command = [sys.executable, str(ROOT / "benchmarks" / "compare_server.py"), str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": str(self._folder)}
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.wait()
        self._pipe.close()

    def ask(self, what: str, case: Row | None = None) -> Any:
        """``prepare`` a case in place of the last one, give its ``time`` in its unit, or ``where`` the checkout is."""
        try:
            self._pipe.send((what, case))
            value, error = self._pipe.recv()
        except (EOFError, OSError) as ended:
            code = self._process.wait()
            raise SystemExit(f"the process of --{self.name} ended with {code}, asked to {what} {case}") from ended
        if error:
            raise Failed(f"{self.name}: {error}")
        return value


def cases(kind: str, small: bool) -> list[Row]:
    """The cases of a kind, in the server's form; ``small``: fast ones, to try the comparison itself."""
    if kind == "attention":
        every = [{"heads": heads, "workload": name} for heads in HEADS for name in DECODE]
        return [{"name": f"{c['heads'][0]}/{c['heads'][1]} {c['workload']}", "unit": "us", **c} for c in every]
    if kind == "engine":
        return [{"name": f"{rows} rows", "unit": "ms", "rows": rows} for rows in (64, 256, 1024)]
    if kind == "calls":
        size = {"prompt": 64, "rows": 4, "new": 4} if small else {"prompt": 512, "rows": 32, "new": 32}
        return [{"name": what, "unit": "ms", **size} for what in ("samples", "beams", "scores", "generate")]
    if kind == "whole":
        return [
            {"name": f"{shape}: {call}", "unit": "s", "shape": shape, "call": call, "kv_budget": "40GiB"}
            for shape, names in OF_SHAPE.items()
            for call in names
        ]
    if kind in ("generate", "session"):
        sized = {"generate": ({"prompt": 256, "rows": 4, "new": 16}, {"prompt": 16, "rows": 1, "new": 1})}
        sized["session"] = ({"known": 16, "new": 1}, {"known": 512, "new": 1}, {"known": 512, "new": 16})
        shape = "words" if small else "SmolLM2-135M"
        return [
            {"name": ", ".join(f"{count} {what}" for what, count in size.items()), "unit": "ms", "shape": shape, **size}
            for size in sized[kind]
        ]
    sizes: dict[str, tuple[str, Row]] = {
        "sampling": ("us a token", {"prompt": 256, "rows": 4 if small else 32, "new": 4 if small else 32}),
        "tree": ("ms", {"sequences": 64 if small else 1024, "tokens": 16_384}),
        "admission": ("ms", {"prompts": 50 if small else 2000}),
    }
    unit, size = sizes[kind]
    return [{"name": ", ".join(f"{count:,} {what}" for what, count in size.items()), "unit": unit, **size}]


def times_of(case: Row, checkouts: list[Checkout], turns: int, fresh: int) -> dict[str, list[float]]:
    """Each checkout's time in each turn; both processes are started anew after every ``fresh`` turns."""
    times: dict[str, list[float]] = {checkout.name: [] for checkout in checkouts}
    for first in range(0, turns, fresh):
        for checkout in checkouts:
            if first:
                checkout.close()
                checkout.start()
            checkout.ask("prepare", case)
        asked = {checkout.name: partial(checkout.ask, "time") for checkout in checkouts}
        for name, found in in_turns(asked, min(fresh, turns - first)).items():
            times[name] += found
    return times


def measure(run: Run, case: Row, checkouts: list[Checkout], turns: int, fresh: int) -> None:
    """A row of a case: both times, their ratio, and the ratios of single turns."""
    row: Row = {name: case[name] for name in (*NAMES, "unit")}
    try:
        times = times_of(case, checkouts, turns, fresh)
    except Failed as error:
        run.add("cases", row | {"skipped": str(error)}, f"{case['kind']:10s} {case['name']:34s} {error}")
        return
    row |= {name: statistics.median(found) for name, found in times.items()}
    each = [new / old for new, old in zip(times["new"], times["old"], strict=True)]
    row |= {"ratio": round(row["new"] / row["old"], 4), "least": round(min(each), 4), "most": round(max(each), 4)}
    text = f"old {row['old']:10.2f}  new {row['new']:10.2f} {row['unit']}  new/old {row['ratio']:.3f}"
    run.add("cases", row, f"{case['kind']:10s} {case['name']:34s} {text} ({row['least']:.3f} to {row['most']:.3f})")


def summary(rows: list[Row]) -> dict[str, Row]:
    """For each kind and for all: the geometric mean of new over old, the worst case, and how many were skipped."""
    found = {}
    for kind in [*dict.fromkeys(row["kind"] for row in rows), "all"]:
        of_kind = [row for row in rows if kind in (row["kind"], "all")]
        timed = sorted((row for row in of_kind if "ratio" in row), key=lambda row: row["ratio"])
        worst = {"worst": timed[-1]["name"], "most": timed[-1]["ratio"]} if timed else {}
        mean = round(geomean(row["ratio"] for row in timed), 4)
        found[kind] = {"cases": len(timed), "skipped": len(of_kind) - len(timed), "new/old": mean, **worst}
    return found


def main(given: list[str] | None = None) -> dict[str, Row]:
    of: Row = {"old": {"type": Path, "required": True}, "new": {"type": Path, "default": ROOT}}
    on_gpu = ON_GPU[:3] if torch.cuda.is_available() else ()
    of |= {"cases": [*on_gpu, "sampling", "tree", "admission", "generate", "session", "calls"], "only": ""}
    options = arguments(__doc__, given, **of, turns=5, fresh=4, small=False, seconds=540.0, resume=True)
    run = Run(options)
    there = run.taken_up("cases", NAMES)
    checkouts = [Checkout("old", options.old), Checkout("new", options.new)]
    run.result["checkouts"] = {checkout.name: checkout.ask("where") for checkout in checkouts}
    print(json.dumps(run.result["checkouts"]), flush=True)
    for case in [{"kind": kind, **case} for kind in options.cases for case in cases(kind, options.small)]:
        if options.only in case["name"] and identity(case, NAMES) not in there and run.left > 0:
            stays = case["kind"] in ON_GPU and torch.cuda.is_available()
            measure(run, case, checkouts, options.turns, options.turns if stays else options.fresh)
    for checkout in checkouts:
        checkout.close()
    found = run.result["summary"] = summary(run.result.get("cases", []))
    run.finish()
    columns = ("cases", "skipped", "new/old", "worst", "most")
    print(table(("kind", *columns), [(kind, *(of.get(name, "-") for name in columns)) for kind, of in found.items()]))
    return found


if __name__ == "__main__":
    main()
