"""``prefixkit report``: the results of run folders, in the terminal and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from prefixkit.cli.errors import at_work
from prefixkit.cli.report_view import show
from prefixkit.cli.run_facts import facts_of
from prefixkit.cli.terminal import line
from prefixkit.evaluation.campaign.folder import RunFolder, check_whole
from prefixkit.evaluation.report import write_report


def run_report(runs: Sequence[Path], out: Path | None, quiet: bool, console: Console) -> None:
    """Show the folders' results, and write the page and its JSON."""
    if twice := [run for place, run in enumerate(runs) if run.resolve() in {one.resolve() for one in runs[:place]}]:
        raise ValueError(f"{twice[0]} is given twice; give each run once")
    folders = [RunFolder(run) for run in runs]
    facts = facts_of(folders)
    place = out or runs[0] / "report.html"
    if place.suffix == ".json":
        raise ValueError(f"--out {place} is where the JSON would be written; give the page another ending, as .html")
    if not place.parent.is_dir():
        raise ValueError(f"--out {place}: there is no folder {place.parent}; make it first")
    if str(place) == "-" or (place.exists() and not place.is_file()):
        raise ValueError(f"--out {place}: a report is two files, a page and its JSON; give the page's name")
    _check_overwritten(folders, place)
    with at_work():
        try:
            page, beside = write_report(facts, place)
        except OSError as error:
            raise OSError(f"cannot write the report to {place}: {error.strerror or error}") from error
        if not quiet:
            show(facts, console)
        check_whole(folders, f"reported in {page}")
    if not quiet:
        console.print(line(f"written to {page} and {beside.name}"), soft_wrap=True)


def _check_overwritten(folders: Sequence[RunFolder], page: Path) -> None:
    """Raise ValueError if the page or its JSON would take the place of something else than an earlier report."""
    beside = page.with_suffix(".json")
    for file in (page, beside):
        if owner := next((folder for folder in folders if folder.owns(file)), None):
            raise ValueError(f"--out {page}: {file} belongs to the run folder {owner.path}; choose another name")
    if beside.exists():
        try:
            known = "pass_at_k" in json.loads(beside.read_bytes())
        except (OSError, ValueError, TypeError):
            known = False
        if not known:
            raise ValueError(f"--out {page}: {beside}, where its JSON goes, is no earlier report; choose another name")
