"""When a function's result is the expected one."""

from __future__ import annotations

import math

import pytest

from prefixkit.evaluation.judge.kinds.values import equal


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "same"),
    [
        (2**53 + 1, float(2**53), 0.0, False),
        (float(2**53), 2**53 + 1, 0.0, False),
        (float(2**53), 2**53 + 1, 1e-9, True),
        (2**53, float(2**53), 0.0, True),
        (2**53 + 1, 2**53, 1e-9, False),
        (10**400, 1.0, 1e-9, False),
        (10**400, math.inf, 1e-9, False),
        (math.inf, math.inf, 0.0, True),
        (math.inf, 1e308, 1e-9, False),
        (math.nan, math.nan, 0.0, True),
        (math.nan, 1, 1e-9, False),
        ([0.1 + 0.2], [0.3], 0.0, False),
        ([0.1 + 0.2], [0.3], 1e-9, True),
    ],
)
def test_numbers_are_equal_as_in_python_but_for_the_tolerance_and_nan(found, expected, tolerance, same):
    assert equal(found, expected, tolerance) is same
