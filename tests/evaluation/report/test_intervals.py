"""Intervals beside published numbers."""

import numpy as np
import pytest

from prefixkit.evaluation.report.intervals import bootstrap, student, wilson


def test_student_quantiles_are_those_of_the_tables():
    for freedom, quantile in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042), (5000, 1.960)):
        assert student(freedom) == pytest.approx(quantile, abs=6e-4)


def test_wilson_is_that_of_the_literature():
    # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3.
    for passed, trials, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson(passed, trials) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert wilson(0, 0) == (0, 1)


def test_the_bootstrap_of_many_values_is_as_wide_as_the_normal_interval():
    values = np.random.default_rng(1).random((500, 2))
    low, high = bootstrap(values)
    width = 2 * 1.96 * values.std(axis=0) / np.sqrt(500)
    np.testing.assert_allclose(high - low, width, rtol=0.06)


def test_the_bootstrap_of_two_values_reaches_both():
    low, high = bootstrap(np.array([[0.2], [0.6]]))
    assert (low[0], high[0]) == pytest.approx((0.2, 0.6))
