"""The files of a report: the page, and its numbers as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from prefixkit.evaluation.report.curves import curves_of
from prefixkit.evaluation.report.page import render_page
from prefixkit.evaluation.report.run_summary import Facts, Problem
from prefixkit.paths import replacing


def write_report(facts: Facts, path: Path) -> tuple[Path, Path]:
    """Write the page to ``path`` and the JSON next to it, each whole or not at all; returns both paths.

    Args:
        path: The page's path, as ``report.html``; its folder must exist.

    Raises:
        OSError: a file cannot be written.
    """
    beside = path.with_suffix(".json")
    if beside == path:
        raise ValueError(f"{path} is where the JSON goes; give the page another ending")
    for place, text in ((path, render_page(facts)), (beside, as_json(facts))):
        with replacing(place) as file:
            file.write(text.encode())
    return path, beside


def as_json(facts: Facts) -> str:
    """The facts, and pass@k with intervals, as ASCII text; programs, prompts and tests are in the run folder."""
    record = {**vars(facts), "pass_at_k": curves_of(facts)}
    return json.dumps(record, indent=1, allow_nan=False, default=_fields) + "\n"


def _fields(value: object) -> dict[str, object]:
    texts = ("prompt", "tests", "candidates") if isinstance(value, Problem) else ()
    return {name: field for name, field in vars(value).items() if name not in texts}
