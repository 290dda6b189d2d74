"""95% confidence intervals of means over problems, and of one problem's rate.

Over problems: the percentile bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13),
with the quantiles moved outwards as Hesterberg does ("What Teachers Should Know about the Bootstrap", The American
Statistician 69(4), 2015, the expanded percentile interval), since the plain percentiles of few problems are too close
together.  Problems are resampled with their estimates, so the interval covers both the choice of problems and the
samples that were drawn.

Of one problem: Wilson's score interval, which Brown, Cai and DasGupta ("Interval Estimation for a Binomial Proportion",
Statistical Science 16(2), 2001) recommend for few samples, and which stays sensible at 0 and at all.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
DRAWS = 4000  # resampled sets of problems: enough that the share of draws beyond a bound is right to within 0.005
SEED = 20210707  # fixed, so that a report is the same each time it is made
_AT_ONCE = 1 << 20  # resampled problems that are held in memory together
_NORMAL_FROM = 1000  # degrees of freedom beyond which Student's t is the normal distribution

Floats = NDArray[np.float64]


def bootstrap(values: Floats) -> tuple[Floats, Floats]:
    """Bounds of the mean of each column, by resampling rows.

    Args:
        values: ``[problems, columns]``, at least two problems.

    Returns:
        The lower and the upper bounds, ``[columns]``.  The bounds of a column of equal values are equal.
    """
    problems = len(values)
    random = np.random.default_rng(SEED)
    at_once = max(1, _AT_ONCE // problems)
    means = np.empty((DRAWS, values.shape[1]))
    for first in range(0, DRAWS, at_once):
        draws = min(at_once, DRAWS - first)
        chosen = random.integers(problems, size=(draws, problems)) + problems * np.arange(draws)[:, None]
        times = np.bincount(chosen.ravel(), minlength=draws * problems).reshape(draws, problems)
        means[first : first + draws] = times @ values / problems
    tail = _expanded_tail(problems)
    low, high = np.quantile(means, (tail, 1 - tail), axis=0)
    return low, high


def wilson(passed: float, trials: int) -> tuple[float, float]:
    """Wilson's score interval of a rate, ``passed`` of ``trials``; a sum of values in 0..1 may stand for ``passed``."""
    if not trials:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    rate, weight = passed / trials, z * z / trials
    middle = (rate + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(rate * (1 - rate) / trials + weight / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


@lru_cache
def _expanded_tail(problems: int) -> float:
    """The share of draws beyond each bound: that of a normal variable beyond Student's quantile * sqrt(n / (n - 1))."""
    return NormalDist().cdf(-math.sqrt(problems / (problems - 1)) * student(problems - 1))


def student(freedom: int) -> float:
    """The bound within which the absolute value of Student's t lies with probability ``LEVEL``, by bisection.

    The distribution function is the finite series of Abramowitz and Stegun, "Handbook of Mathematical Functions",
    26.7.3 and 26.7.4, in the angle ``atan(t / sqrt(freedom))``.
    """
    if freedom > _NORMAL_FROM:
        return NormalDist().inv_cdf((1 + LEVEL) / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        if _within(angle, freedom) < LEVEL:
            low = angle
        else:
            high = angle
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The probability that the absolute value of t is at most ``tan(angle) * sqrt(freedom)``."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for step in range(2 + odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (step - 1) / step
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
