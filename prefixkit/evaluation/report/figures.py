"""Line figures in pixels: pass@k over k, and tokens and samples over time.  The template draws them as SVG.

Each figure is made for a wide and for a narrow screen: text in a figure that is scaled down could not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prefixkit.evaluation.report.axes import Scale, Tick, log_ticks, nice_range, steps
from prefixkit.evaluation.report.numbers import duration, percent, plural, short, time_unit
from prefixkit.evaluation.report.pass_at_k import Curve
from prefixkit.evaluation.report.run_summary import Progress

WIDE, NARROW = 840, 340  # pixels
LINE = 14.0  # between the labels of lines
STYLES = 8  # of lines: colours, dashes and marks
MOST_BANDS = 4  # more bands on top of each other could not be told apart
_MOST_POINTS = 240  # points of a line over time
_STEP = 10.0  # seconds: the shortest interval that the speed is averaged over, in runs longer than that


@dataclass(frozen=True)
class Stroke:
    """A line, its interval's band, and its label."""

    label: str
    style: int
    line: str  # points, as SVG writes them
    band: str = ""
    marks: tuple[tuple[float, float], ...] = ()
    label_y: float = 0.0


@dataclass(frozen=True)
class Shade:
    """A stretch of the horizontal axis in which nothing ran."""

    x: float
    width: float
    label: str


@dataclass(frozen=True)
class Figure:
    """A figure and its frame, in pixels."""

    title: str
    text: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_label: str
    y_label: str
    strokes: tuple[Stroke, ...]
    shades: tuple[Shade, ...] = ()


def curve_figure(curves: Sequence[Curve], width: int) -> Figure:
    """pass@k over k, on a logarithmic axis, with bands of the intervals."""
    points = [point for curve in curves for point in curve.points]
    ks = sorted({point.k for point in points})
    named = [curve for curve in curves if curve.label]
    room = min(110, 14 + 7 * max(len(curve.label) for curve in named)) if named else 14
    height = 360 if width == WIDE else 260
    left, right, top, bottom = 46.0, width - float(room), 12.0, height - 40.0
    low, high, step = nice_range(min(p.low for p in points), min(1.0, max(p.high for p in points)), 6)
    x, y = Scale(ks[0], ks[-1], left + 8, right - 8, log=True), Scale(low, high, bottom, top)
    ends = _apart([y(curve.points[-1].estimate) for curve in curves], top, bottom)
    strokes = []
    for index, curve in enumerate(curves):
        marks = tuple((x(p.k), y(p.estimate)) for p in curve.points)
        around = [(x(p.k), y(p.high)) for p in curve.points] + [(x(p.k), y(p.low)) for p in reversed(curve.points)]
        band = _line(around) if len(curves) <= MOST_BANDS else ""
        strokes.append(Stroke(curve.label, index % STYLES, _line(marks), band, marks, ends[index]))
    y_ticks = tuple(Tick(y(value), f"{100 * value:.3g}%") for value in steps(low, high, step))
    first, last = points[0], points[len(curves[0].points) - 1]
    text = f"From {percent(first.estimate)} at k = {first.k:,} to {percent(last.estimate)} at k = {last.k:,}"
    text += f" in the first of {len(curves)} groups." if len(curves) > 1 else "."
    x_ticks = log_ticks(ks, x)
    frame = (float(width), float(height), left, right, top, bottom)
    return Figure("pass@k over k", text, *frame, x_ticks, y_ticks, "k, samples per problem", "pass@k", tuple(strokes))


def progress_figures(progress: Sequence[Sequence[Progress]], width: int) -> tuple[Figure, ...]:
    """Tokens per second, and samples finished, over wall time; none if no time passed between moments."""
    starts = [moments for moments in progress if moments and moments[-1].seconds > moments[0].seconds]
    if not starts:
        return ()
    rates = [[point for pair in _paced(_thinned(moments)) for point in pair] for moments in starts]
    samples = [[(moment.seconds, float(moment.samples)) for moment in _thinned(moments)] for moments in starts]
    both = ((rates, "Tokens per second", "tokens/s"), (samples, "Samples finished", "samples"))
    return tuple(_over_time(lines, title, label, width) for lines, title, label in both)


def _over_time(lines: Sequence[Sequence[tuple[float, float]]], title: str, label: str, width: int) -> Figure:
    height = 200 if width == WIDE else 180
    left, right, top, bottom = 52.0, width - 16.0, 14.0, height - 40.0
    end = lines[-1][-1][0]
    unit, name = time_unit(end)
    _, _, every = nice_range(0.0, end / unit, 8 if width == WIDE else 5)
    highest = max(value for line in lines for _, value in line)
    _, high, step = nice_range(0.0, highest, 4)
    x, y = Scale(0.0, end, left, right), Scale(0.0, high, bottom, top)
    strokes = tuple(Stroke("", 0, _line([(x(second), y(value)) for second, value in line])) for line in lines)
    shades = tuple(
        Shade(x(first), max(1.0, round(x(last) - x(first), 1)), f"stopped for {duration(last - first)}")
        for first, last in ((before[-1][0], after[0][0]) for before, after in pairwise(lines))
    )
    x_ticks = tuple(
        Tick(x(index * every * unit), f"{index * every:.4g}") for index in range(int(end / unit / every + 1e-9) + 1)
    )
    y_ticks = tuple(Tick(y(value), short(value)) for value in steps(0.0, high, step))
    stops = f"; stopped {plural(len(shades), 'time')}" if shades else ""
    text = f"Over {duration(end)} of wall time{stops}; the highest value is {short(highest)}."
    frame = (float(width), float(height), left, right, top, bottom)
    return Figure(title, text, *frame, x_ticks, y_ticks, f"wall time, {name}", label, strokes, shades)


def _thinned(moments: Sequence[Progress]) -> Sequence[Progress]:
    """At most about ``_MOST_POINTS`` moments, the first and the last among them."""
    every = -(-len(moments) // _MOST_POINTS)
    return [*moments[:-1:every], moments[-1]]


def _paced(moments: Sequence[Progress]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Tokens per second between two moments, as a step of a staircase.

    Tokens are counted when samples finish, often many at once: over less than ``_STEP`` they do not show the speed.
    """
    ends = [moments[0]]
    for moment in moments:
        if moment.seconds - ends[-1].seconds >= _STEP:
            ends.append(moment)
    ends = [ends[0], *ends[1:-1], moments[-1]]
    stairs = []
    for first, second in pairwise(ends):
        if second.seconds > first.seconds:
            pace = max(0, second.tokens - first.tokens) / (second.seconds - first.seconds)
            stairs.append(((first.seconds, pace), (second.seconds, pace)))
    return stairs


def _apart(places: Sequence[float], top: float, bottom: float) -> list[float]:
    """Places of labels near the ends of their lines, each a line apart from the next, within the frame."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    found, free = [0.0] * len(places), top
    for index in order:
        found[index] = free = max(places[index], free)
        free += LINE
    limit = max(bottom, top + LINE * (len(places) - 1))
    for index in reversed(order):
        found[index] = min(found[index], limit)
        limit = found[index] - LINE
    return [round(place, 1) for place in found]


def _line(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)
