"""pass@k: the probability that at least one of k samples of a problem passes.

The estimator of Chen et al., "Evaluating Large Language Models Trained on Code", 2021, arXiv:2107.03374, is unbiased
for a problem with n samples of which c passed: ``1 - C(n - c, k) / C(n, k)``, computed as the product
``1 - prod(1 - k / i for i in n - c + 1 .. n)``, which neither overflows nor cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixkit.evaluation.report.intervals import Floats, bootstrap, wilson


@dataclass(frozen=True)
class Point:
    """pass@k of a set of problems.

    Attributes:
        k: The number of samples of which one must pass.
        estimate: The mean over the problems with at least k samples; 0 to 1.
        low, high: Its 95% confidence interval.
        problems: The number of problems with at least k samples.
        left_out: The number of problems with fewer.
    """

    k: int
    estimate: float
    low: float
    high: float
    problems: int
    left_out: int


@dataclass(frozen=True)
class Curve:
    """pass@k over k, of one group of samples.

    Attributes:
        label: The group, as "T=0.6".
        points: By rising k; none if no problem has a judged sample.
    """

    label: str
    points: tuple[Point, ...]

    def at(self, k: int) -> Point | None:
        """The point of k, if there is one."""
        return next((point for point in self.points if point.k == k), None)


def estimate(samples: Sequence[int], passed: Sequence[int], k: int) -> Floats:
    """pass@k of each problem; NaN for problems with fewer than k samples.

    Args:
        samples: n of each problem.
        passed: c of each problem.
        k: At least 1.

    Raises:
        ValueError: k is below 1, the lengths differ, or a count is negative or c is above n.
    """
    n, c = np.asarray(samples, dtype=np.int64), np.asarray(passed, dtype=np.int64)
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if n.ndim != 1 or n.shape != c.shape:
        raise ValueError(f"samples and passed must have one number for each problem, not {n.shape} and {c.shape}")
    if ((c < 0) | (c > n)).any():
        raise ValueError("of n samples of a problem, 0 to n passed")
    values = np.full(len(n), np.nan)
    for size in np.unique(n[n >= k]).tolist():
        here = n == size
        # Entry c is the probability that none of k passes: a factor for each sample that passed; the factor of i = k
        # is 0, and with more that passed, k samples without one do not exist.
        none_passes = np.concatenate([[1.0], np.cumprod(1 - k / np.arange(size, k - 1, -1))])
        values[here] = 1 - none_passes[np.minimum(c[here], len(none_passes) - 1)]
    return values


def ks_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``most``, and ``most`` itself."""
    steps = [step * 10**power for power in range(len(str(max(most, 1)))) for step in (1, 2, 5)]
    return tuple(k for k in steps if k < most) + ((most,) if most > 0 else ())


def pass_at_k_curve(
    samples: Sequence[int], passed: Sequence[int], ks: Sequence[int] | None = None, label: str = ""
) -> Curve:
    """pass@k over k with 95% confidence intervals.

    The intervals are over problems (:func:`~prefixkit.evaluation.report.intervals.bootstrap`), except for two cases.  A
    single problem cannot be resampled: its interval is Wilson's for its rate c / n, mapped through ``1 - (1 -
    rate)**k``, and covers only the choice of samples.  If all problems have equal values, as when none is solved,
    resampling finds no spread: the interval is Wilson's with the problems as trials, which is wide enough for any
    values in 0..1, since values of 0 and 1 vary most.  pass@k never falls with k, so such a point keeps a lower bound
    that was found at a smaller k.

    Args:
        samples: n of each problem: its judged samples.
        passed: c of each problem.
        ks: By default :func:`ks_up_to` the smallest number of samples of a problem that has any, so that all points of
            the curve are over the same problems.
        label: The curve's label.

    Raises:
        ValueError: as for :func:`estimate`.
    """
    if ks is None:
        ks = ks_up_to(min((int(n) for n in samples if n > 0), default=0))
    points: list[Point] = []
    columns = [estimate(samples, passed, k) for k in sorted(set(ks))]
    sets = [np.flatnonzero(~np.isnan(column)) for column in columns]
    bounds = _bounds(columns, sets)
    for k, column, chosen, (low, high) in zip(sorted(set(ks)), columns, sets, bounds, strict=True):
        if not len(chosen):
            continue
        values = column[chosen]
        mean = float(values.mean())
        if len(chosen) == 1:
            rates = wilson(passed[chosen[0]], samples[chosen[0]])
            low, high = (1 - (1 - rate) ** k for rate in rates)
        elif np.ptp(values) == 0:
            low, high = wilson(float(values.sum()), len(values))
            same = [point.low for point in points if point.problems == len(chosen)]
            low = max([low, *same])
        # Wilson's interval belongs to another estimate, and means are rounded: keep the bounds around the estimate.
        low, high = min(low, mean), max(high, mean)
        points.append(Point(k, mean, low, high, len(chosen), len(column) - len(chosen)))
    return Curve(label, tuple(points))


def _bounds(columns: Sequence[Floats], sets: Sequence[np.ndarray]) -> list[tuple[float, float]]:
    """Bootstrap bounds of each column; columns over the same problems share their draws, which is faster."""
    found = [(0.0, 1.0)] * len(columns)
    for size in {len(chosen) for chosen in sets if len(chosen) > 1}:  # sets of equal size are equal, as k only grows
        alike = [index for index, chosen in enumerate(sets) if len(chosen) == size]
        low, high = bootstrap(np.stack([columns[index][sets[index]] for index in alike], axis=1))
        for place, index in enumerate(alike):
            found[index] = float(low[place]), float(high[place])
    return found
