"""``prefixkit evaluate``: the candidates of a run folder, judged in a sandbox."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from prefixkit.cli.errors import Interrupted, at_work
from prefixkit.cli.progress import Count
from prefixkit.cli.report_view import show
from prefixkit.cli.run_facts import facts_of
from prefixkit.cli.terminal import line
from prefixkit.evaluation.campaign.folder import Part, RunFolder, check_whole
from prefixkit.evaluation.campaign.verdicts import Judged, judge_samples
from prefixkit.evaluation.judge import BadTests, Judge


def run_evaluate(run: Path, jobs: int | None, unsafe: bool, quiet: bool, console: Console) -> None:
    """Judge the candidates that have no verdict yet, and show pass@k."""
    folder = RunFolder(run)
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    if not any(one.problem.tests for one in folder.asked()):
        check_whole([folder], "read")
        raise ValueError(f"the problems of {run} have no tests; give prefixkit sample problems that bring some")
    judged = 0
    with folder.judging(), open_judge(quiet, jobs=jobs, plain_subprocesses=unsafe) as judge:
        try:
            judged = judge_with_bar(folder, judge, "all", quiet, console)
        except BadTests as error:
            folder.damage.setdefault(str(error))
    if not quiet:
        show(facts_of([folder]), console)
    with at_work():
        check_whole([folder], "judged")
    if not quiet:
        said = f"{judged:,} candidates judged in {run}; prefixkit report {run} makes a page"
        console.print(line(said), soft_wrap=True)


@contextmanager
def open_judge(quiet: bool, **options: Any) -> Iterator[Judge]:
    """A judge whose log lines are shown: whether programs have cgroups, or no sandbox at all."""
    log = logging.getLogger("prefixkit.evaluation.judge")
    level = log.level
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        with Judge(**options) as judge:
            yield judge
    finally:
        log.setLevel(level)


def judge_with_bar(
    folder: RunFolder,
    judge: Judge,
    tag: str,
    quiet: bool,
    console: Console,
    wanted: Callable[[int, int], bool] = lambda place, index: True,
    on_verdict: Callable[[Judged], None] = lambda judged: None,
) -> int:
    """Judge under a progress bar; returns how many candidates have a verdict now."""
    tested = [one.problem.tests is not None for one in folder.asked()]
    found = ((folder.places[record["id"]], record["index"]) for record in folder.samples())
    total = sum(1 for place, index in found if tested[place] and wanted(place, index))
    with at_work(), Count(total, console, quiet) as bar:

        def count(judged: Judged) -> None:
            bar.count(judged.verdict.passed)
            on_verdict(judged)

        try:
            judge_samples(folder, judge, tag, wanted=wanted, on_verdict=count)
        except KeyboardInterrupt:
            said = f"{bar.done:,} of {total:,} candidates were judged; the same command resumes in {folder.path}"
            raise Interrupted(said) from None
    return bar.done


def solved_of(
    folder: RunFolder, part: Part, judge: Judge, quiet: bool, console: Console
) -> Callable[[Sequence[int], int], set[int]]:
    """A function that judges the samples of earlier rounds and returns the problems that they solve.

    Problems whose tests do not run are named in the log, and never solved.
    """
    solved: set[int] = set()

    def before_a_round(places: Sequence[int], first: int) -> set[int]:
        left = set(places) - solved

        def note(judged: Judged) -> None:
            if judged.verdict.passed:
                solved.add(judged.place)

        def wanted(place: int, index: int) -> bool:
            return place in left and index < first

        try:
            judge_with_bar(folder, judge, part.tag, quiet, console, wanted, note)
        except BadTests as error:  # they solve nothing, and other problems go on
            folder.warn(str(error))
        return solved & set(places)

    return before_a_round
