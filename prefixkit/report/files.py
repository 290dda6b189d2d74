"""The files of a report: the page, and its numbers as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from prefixkit.report.curves import curves_of
from prefixkit.report.facts import Facts
from prefixkit.report.page import render_page


def write_report(facts: Facts, path: Path) -> tuple[Path, Path]:
    """Write the page to ``path`` and the JSON beside it, each whole or not at all, over what was there.

    Args:
        path: Of the page, as ``report.html``; its folder exists.

    Returns:
        The paths of the page and of the JSON.

    Raises:
        OSError: a file cannot be written.
    """
    beside = path.with_suffix(".json")
    if beside == path:
        raise ValueError(f"{path} is where the JSON goes; give the page another ending")
    _replace(path, render_page(facts))
    _replace(beside, as_json(facts))
    return path, beside


def as_json(facts: Facts) -> str:
    """The facts, and pass@k with intervals, as ASCII text."""
    record = facts.to_json() | {"pass_at_k": [asdict(curve) for curve in curves_of(facts)]}
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
