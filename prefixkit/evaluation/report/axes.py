"""Axes of a figure: the pixel of each value, and the places of the marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DIGIT = 7.0  # pixels of a character of a mark, about


@dataclass(frozen=True)
class Scale:
    """An axis: values ``low`` to ``high`` lie at pixels ``start`` to ``end``; ``log``: by their logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value, in tenths of a pixel."""
        low, high, value = (math.log(one) if self.log else one for one in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


@dataclass(frozen=True)
class Tick:
    """A mark of an axis, in pixels; without a label if there is no room for one."""

    at: float
    label: str


def nice_step(length: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, ... (and their tenths) that divides ``length`` into at most ``most`` parts."""
    least = length / most
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def nice_range(low: float, high: float, most: int) -> tuple[float, float, float]:
    """``(low, high, step)`` of an axis around some values, in whole steps; it starts at 0 if ``low`` is near 0."""
    if low > 0 and low < 0.5 * high:
        low = 0.0
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = nice_step(high - low, most)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step


def steps(low: float, high: float, step: float) -> list[float]:
    """The marks of :func:`nice_range`."""
    return [low + index * step for index in range(round((high - low) / step) + 1)]


def log_ticks(values: Sequence[int], scale: Scale) -> tuple[Tick, ...]:
    """A tick for each value; ticks whose label would touch the label before it have none, except for the last."""
    places = [scale(value) for value in values]
    widths = [DIGIT * (len(f"{value:,}") + 1) for value in values]
    last = places[-1] - widths[-1] / 2
    ticks, free = [], -math.inf
    for index, (value, place, width) in enumerate(zip(values, places, widths, strict=True)):
        fits = place - width / 2 >= free and (place + width / 2 <= last or index == len(values) - 1)
        ticks.append(Tick(place, f"{value:,}" if fits else ""))
        free = place + width / 2 if fits else free
    return tuple(ticks)
