"""When an output is the expected one."""

from __future__ import annotations

import time

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
        ("0" * 5000 + "7", "7", True),
        ("9007199254740993", "9007199254740992.0", False),
        ("9007199254740993.00", "9007199254740993", True),
        ("1" + "0" * 23, "1e23", True),
        ("+7", "7.0", True),
        ("-0.0", "0", True),
    ],
)
def test_whole_numbers_are_equal_to_what_is_equal_as_written_however_long(found, expected, same):
    assert accepts(found.encode(), expected, "numbers") is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (f"{0.5:.450f}", "0.5", True),
        (f"{0.5:.450f}", "0.25", False),
        (f"{0.1:.60f}", "0.1", True),
        ("1e400", "1e401", False),
        ("1e400", "10.0e399", True),
        ("1e400", "inf", True),
        ("1e400", "1", False),
        ("-1e400", "1e400", False),
        ("Infinity", "inf", True),
        ("inf", "-inf", False),
        ("NaN", "nan", True),
        ("nan", "1", False),
        ("1e99999999999999999999", "2e99999999999999999999", False),
        ("1_0", "10", False),
        ("1e5", "1e5x", False),
    ],
)
@pytest.mark.parametrize("tolerance", [0.0, 1e-9])
def test_fractions_are_compared_as_floats_and_what_is_beyond_floats_as_written(found, expected, same, tolerance):
    assert accepts(found.encode(), expected, "numbers", tolerance) is same


@pytest.mark.parametrize("word", ["{}", "{}.5", "0.{}", "{}e9", "1e{}", "0.{}1e-5"])
def test_time_is_linear_in_the_length_of_a_word(word):
    """A million digits take seconds if time grows with the square of their number."""
    long = word.format("9" * 1_000_000).encode()
    for expected in ("7", "0.5", "1e400", long.decode() + "0"):
        began = time.process_time()
        accepts(long, expected, "numbers")
        assert time.process_time() - began < 1
