"""The pass@k curves of a run, and the points in its headline."""

from __future__ import annotations

from collections.abc import Sequence

from prefixkit.evaluation.report.pass_at_k import Curve, Point, ks_up_to, pass_at_k_curve
from prefixkit.evaluation.report.run_summary import Facts


def curves_of(facts: Facts) -> tuple[Curve, ...]:
    """A curve for each group, or one of all samples; none if no sample was judged.

    All curves have the same k, so that they can be compared: up to the fewest judged samples that a problem has in
    any group.
    """
    if facts.groups:
        sets = [(group.label, group.counts) for group in facts.groups]
    else:
        sets = [("", tuple((problem.judged, problem.passed) for problem in facts.problems))]
    ks = ks_up_to(min((n for _, counts in sets for n, _ in counts if n > 0), default=0))
    found = [pass_at_k_curve([n for n, _ in counts], [c for _, c in counts], ks, label) for label, counts in sets]
    return tuple(curve for curve in found if curve.points)


def best_at(found: Sequence[Curve], k: int) -> tuple[str, Point] | None:
    """The label and the point of the curve that is highest at k."""
    points = [(curve.label, point) for curve in found if (point := curve.at(k))]
    return max(points, key=lambda pair: pair[1].estimate, default=None)


def last_k(found: Sequence[Curve]) -> int:
    """The largest k; 0 without curves."""
    return max((curve.points[-1].k for curve in found), default=0)
