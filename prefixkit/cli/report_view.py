"""What the terminal shows of a report."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from prefixkit.cli.terminal import line
from prefixkit.cli.views import saved_table
from prefixkit.evaluation.report import Curve, Facts, Problem, curves_of
from prefixkit.evaluation.report.numbers import count, duration, interval, percent, plural
from prefixkit.evaluation.report.shown import cut_end
from prefixkit.evaluation.report.verdict_figures import outcome_lines

MOST = 5  # problems that are listed as hardest and as easiest
LONGEST_ID = 40
NARROWEST, GROUP = 9, 28  # columns of the table of pass@k without groups, and of each group


def show(facts: Facts, console: Console) -> None:
    """pass@k with intervals, verdicts, the hardest and easiest problems, and what was saved."""
    console.print(line((facts.title, "bold"), *([f"  {facts.model}"] if facts.model else [])))
    console.print(line(_sums(facts)))
    if found := curves_of(facts):
        _show_curves(found, console)
    if facts.samples:
        _show_verdicts(facts, console)
    if facts.judged_problems:
        _show_problems(facts, console)
    if facts.saved.rows:
        console.print(saved_table((row.what, row.ours, row.plain, row.ratio) for row in facts.saved.rows))


def _sums(facts: Facts) -> str:
    said = f"{plural(facts.samples, 'sample')} of {plural(len(facts.problems), 'problem')}, "
    said += f"{facts.solved:,} of {facts.judged_problems:,} judged solved"
    if facts.tokens_per_second is not None:
        said += f", {plural(facts.new_tokens, 'new token')} in {duration(facts.seconds)}: "
        said += f"{count(facts.tokens_per_second)} tokens/s"
    return said


def _show_curves(found: Sequence[Curve], console: Console) -> None:
    """pass@k: k downwards, groups to the right, in as many tables as the terminal's width requires."""
    points = [curve.points[0] for curve in found]
    over = plural(max(point.problems for point in points), "problem")
    left_out = max(point.left_out for point in points)
    out = f"; {left_out:,} left out, without enough judged samples" if left_out else ""
    console.print(line(("pass@k", "bold"), f", mean over {over}{out}"))
    beside = max(1, (console.width - NARROWEST) // GROUP)
    for first in range(0, len(found), beside):
        console.print(_curve_table(found[first : first + beside]))


def _curve_table(found: Sequence[Curve]) -> Table:
    table = Table("k")
    for curve in found:
        table.add_column(line(curve.label or "pass@k"), justify="right")
        table.add_column("95% interval", justify="right")
    for row in zip(*(curve.points for curve in found), strict=True):
        cells = [text for point in row for text in (percent(point.estimate), interval(point))]
        table.add_row(f"{row[0].k:,}", *cells)
    return table


def _show_verdicts(facts: Facts, console: Console) -> None:
    table = Table()
    for name in ("verdict", "samples", "share"):
        table.add_column(name, justify="left" if name == "verdict" else "right", no_wrap=True)
    table.add_column("the program")
    for one in outcome_lines(facts.counts):
        style = "green" if one.outcome == "passed" else ""
        table.add_row(line((one.outcome, style)), one.count, one.share, one.meaning)
    console.print(table)


def _show_problems(facts: Facts, console: Console) -> None:
    """The hardest and the easiest problems, none of them twice."""
    judged = [problem for problem in facts.by_hardness() if problem.judged]
    if len(judged) <= 2 * MOST:
        parts: list[tuple[str, Sequence[Problem]]] = [("problems, hardest first", judged)]
    else:
        parts = [("hardest problems", judged[:MOST]), ("easiest problems", judged[-MOST:])]
    table = Table("")
    for name in ("passed", "rate", "first solved", "distinct"):
        table.add_column(name, justify="right")
    for name, problems in parts:
        table.add_row(line((name, "dim")))
        for problem in problems:
            table.add_row(*map(line, _cells(problem)))
    console.print(table)
    if unsolved := facts.judged_problems - facts.solved:
        console.print(line(f"{plural(unsolved, 'problem')} not solved by any sample"))


def _cells(problem: Problem) -> tuple[str, ...]:
    rate = "-" if problem.rate is None else percent(problem.rate)
    passed = f"{problem.passed:,} / {problem.judged:,}"
    return cut_end(problem.id, LONGEST_ID), passed, rate, count(problem.first_solved), count(problem.distinct)
