"""Write docs/measured/h200.md, h100.md and cpu.md: of each measure the newest result in benchmarks/results.

    python -m scripts.measured_pages

Each section names its file, the commit and the command; measured_pages.toml chooses the files.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts import measured_tables
from scripts.measured_tables import ROOT, Table

RECORDED, FOLDER = ROOT / "benchmarks" / "results", ROOT / "docs" / "measured"
MEASURES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


TITLES = {
    "h200": "One NVIDIA H200",
    "h100": "One NVIDIA H100",
    "cpu": "CPUs",
}


def page(machine: str) -> str:
    parts = [
        f"# {TITLES[machine]}",
        "`scripts/measured_pages.py` wrote this page; [Measured](index.md) says how to read it.",
    ]
    for one in MEASURES[machine]:
        data = json.loads((RECORDED / one["file"]).read_text())
        rows: Table = getattr(measured_tables, one["show"])(data)
        parts += [f"## {one['title']}", one["says"], markdown(rows), origin(one["file"], data)]
    return "\n\n".join(parts) + "\n"


def markdown(rows: Table) -> str:
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def origin(file: str, data: Any) -> str:
    """Where the numbers of a section come from."""
    runs = data["runs"] if isinstance(data.get("runs"), list) else [data]
    first, commits = runs[0], list(dict.fromkeys(run["commit"][:7] for run in runs))
    machine = first.get("machine") or data
    versions = (f"{name} {machine[name]}" for name in ("torch", "transformers") if name in machine)
    cpu = [machine["cpu"]] if machine.get("gpu") == "none" else []
    told = ", ".join((f"`{file}`", f"commit {' and '.join(commits)}", *cpu, *versions))
    return f"*{told}.* `{first['command']}`"


def pages() -> Iterable[tuple[Path, str]]:
    """Each page's path and text."""
    return ((FOLDER / f"{machine}.md", page(machine)) for machine in MEASURES)


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text)
        print(f"wrote {path}")
