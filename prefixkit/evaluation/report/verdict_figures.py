"""Verdicts as stacked bars, and problems as rows of a table and cells of a strip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefixkit.evaluation.report.numbers import count, percent
from prefixkit.evaluation.report.run_summary import OUTCOMES, Facts, Problem, hardness

BAR = 120  # pixels of a bar in the table
FEW, MANY = 24, 300  # problems: up to FEW, a cell of the strip has room for its number; beyond MANY, cells are small
CELL = 24  # pixels of a cell's height
SHADES = 5  # shades of a cell's colour


@dataclass(frozen=True)
class Segment:
    """A part of a bar, in pixels."""

    outcome: str
    x: float
    width: float
    title: str


@dataclass(frozen=True)
class OutcomeLine:
    """A line of the table of verdicts."""

    outcome: str
    count: str
    share: str
    meaning: str


@dataclass(frozen=True)
class ProblemRow:
    """A problem in the table, the strip and the list of programs.

    Attributes:
        number: Its place in the data set, from 1, which identifies it within the page.
        rate: The share that passed, as text; a dash if no sample was judged.
        sort: The key to sort by rate: below 0 if no sample was judged.
        filled: The number of filled pixels of the cell.
        shade: The shade of the cell, 0 (none passed) to ``SHADES``; -1 if no sample was judged.
        segments: Its verdicts as a bar.
    """

    number: int
    problem: Problem
    rate: str
    sort: float
    filled: float
    shade: int
    segments: tuple[Segment, ...]

    @property
    def ratio(self) -> str:
        """``3 of 200 passed``."""
        return f"{self.problem.passed:,} of {self.problem.judged:,} passed" if self.problem.judged else "not judged"


def segments(counts: Mapping[str, int], width: float) -> tuple[Segment, ...]:
    """A bar of the outcomes that occur, a pixel or more for each."""
    present = [(name, counts.get(name, 0)) for name in OUTCOMES if counts.get(name, 0)]
    total = sum(number for _, number in present)
    free = width - len(present)
    found, x = [], 0.0
    for name, number in present:
        wide = 1 + free * number / total
        found.append(Segment(name, round(x, 1), round(wide, 1), f"{name}: {count(number)}, {percent(number / total)}"))
        x += wide
    return tuple(found)


def outcome_lines(counts: Mapping[str, int]) -> tuple[OutcomeLine, ...]:
    """The outcomes that occur."""
    total = sum(counts.values())
    return tuple(
        OutcomeLine(name, count(counts[name]), percent(counts[name] / total), OUTCOMES[name])
        for name in OUTCOMES
        if counts.get(name)
    )


def problem_rows(facts: Facts) -> tuple[ProblemRow, ...]:
    """All problems, hardest first."""
    numbered = sorted(enumerate(facts.problems, 1), key=lambda pair: hardness(pair[1]))
    return tuple(_row(number, problem) for number, problem in numbered)


def _row(number: int, problem: Problem) -> ProblemRow:
    rate = problem.rate
    if rate is None:
        text, shade = "-", -1
    else:
        text, shade = percent(rate), min(SHADES, 1 + int(rate * SHADES)) if rate else 0
    filled = round(max(1.5, rate * CELL), 1) if rate else 0.0
    bar = segments(problem.counts, BAR)
    return ProblemRow(number, problem, text, -1.0 if rate is None else rate, filled, shade, bar)
