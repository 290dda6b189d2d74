"""When an output is the expected one."""

from __future__ import annotations

import pytest

from prefixkit.evaluation.judge.kinds.texts import accepts


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("7", "007", True),
        ("+7", "7", True),
        ("-7", "7", False),
        ("-0", "0", True),
        ("00", "0", True),
        ("12345678901234567890", "12345678901234567891", False),
        ("7", "9" * 5000, False),
        ("9" * 5000, "9" * 5000, True),
        ("7", "0" * 5000 + "7", True),
    ],
)
def test_whole_numbers_are_equal_however_long_the_expected_one_is(found, expected, same):
    assert accepts(found.encode(), expected, "numbers") is same
