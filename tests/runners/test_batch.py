"""When a batch makes way for requests that wait."""

from __future__ import annotations

import pytest

from prefixkit.runners.batch import LARGE, STEP_BY_STEP, Pace


@pytest.mark.parametrize(
    ("rows", "ended", "makes_way"),
    [
        (8, 0, False),
        (8, 1, True),
        (64, 7, False),
        (64, 8, True),
        (LARGE, LARGE // 4 - 1, False),
        (LARGE, LARGE // 4, True),
    ],
)
def test_one_sample_in_eight_has_ended_and_of_large_batches_one_in_four(rows, ended, makes_way):
    assert Pace(waited_for=8).makes_way(ended, rows) is makes_way


def test_by_default_it_does_as_soon_as_a_sample_has_ended():
    assert STEP_BY_STEP.makes_way(1, 10_000) and not STEP_BY_STEP.makes_way(0, 10_000)
