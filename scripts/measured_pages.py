"""Write docs/measured/h200.md and cpu.md, and docs/appendix/earlier.md: the newest recorded result of each measure.

    python -m scripts.measured_pages

Each section names its file, the commit and the command; measured_pages.toml chooses the files.  Pages of machines hold
only results measured at the release or later; the appendix holds the others.
"""

from __future__ import annotations

import json
import subprocess
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts import measured_tables
from scripts.measured_tables import ROOT, Table

RECORDED, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
CHOSEN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
RELEASE: str = CHOSEN["release"]


TITLES = {"h200": "One NVIDIA H200", "h100": "One NVIDIA H100", "cpu": "CPUs"}
SHORT = {"h200": "H200", "h100": "H100", "cpu": "CPU"}
WROTE = "`scripts/measured_pages.py` wrote this page; [Measured]({}index.md) says how to read it."


def page(machine: str) -> str:
    parts = [f"# {TITLES[machine]}", WROTE.format("")]
    for one in measures(machine, earlier=False):
        parts += section(one, one["title"])
    return "\n\n".join(parts) + "\n"


def earlier_page() -> str:
    says = f"Tables of commits before release 0.2.0. {WROTE.format('../measured/')}"
    parts = ["# Earlier measurements", wrapped(says)]
    for machine in TITLES:
        for one in measures(machine, earlier=True):
            parts += section(one, f"{one['title']} ({SHORT[machine]})")
    return "\n\n".join(parts) + "\n"


def measures(machine: str, earlier: bool) -> list[dict[str, Any]]:
    """The entries of a machine's page, or those of the appendix."""
    return [one for one in CHOSEN[machine] if one.get("earlier", False) is earlier]


def section(one: dict[str, Any], title: str) -> Iterator[str]:
    data = json.loads((RECORDED / one["file"]).read_text())
    rows: Table = getattr(measured_tables, one["show"])(data)
    return iter((f"## {title}", wrapped(one["says"]), markdown(rows), origin(one["file"], data)))


def markdown(rows: Table) -> str:
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def runs_of(data: Any) -> list[Any]:
    return data["runs"] if isinstance(data.get("runs"), list) else [data]


def origin(file: str, data: Any) -> str:
    """A line about the source of a section's numbers."""
    runs = runs_of(data)
    first, commits = runs[0], list(dict.fromkeys(run["commit"][:7] for run in runs))
    machine = first.get("machine") or data
    versions = (f"{name} {machine[name]}" for name in ("torch", "transformers") if name in machine)
    cpu = [machine["cpu"]] if machine.get("gpu") == "none" else []
    told = ", ".join((f"`{file}`", f"commit {' and '.join(commits)}", *cpu, *versions))
    return wrapped(f"*{told}.* `{first['command']}`")


def wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def pages() -> Iterable[tuple[Path, str]]:
    """Each page's path and text."""
    machines = [machine for machine in TITLES if measures(machine, earlier=False)]
    yield from ((DOCS / "measured" / f"{machine}.md", page(machine)) for machine in machines)
    yield DOCS / "appendix" / "earlier.md", earlier_page()


def older() -> Iterator[str]:
    """Files on pages of machines that were measured before the release, by git's history."""
    for machine in TITLES:
        for one in measures(machine, earlier=False):
            for run in runs_of(json.loads((RECORDED / one["file"]).read_text())):
                ask = ["git", "merge-base", "--is-ancestor", RELEASE, run["commit"]]
                if subprocess.run(ask, cwd=ROOT, check=False).returncode:
                    yield f"{one['file']}: commit {run['commit']} is older than {RELEASE}, or unknown"


if __name__ == "__main__":
    if complaints := list(older()):
        raise SystemExit("mark these `earlier`, or measure again:\n" + "\n".join(complaints))
    for path, text in pages():
        path.write_text(text)
        print(f"wrote {path}")
