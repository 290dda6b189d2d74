"""What the bar says, with a clock of the test's own."""

import io

import pytest
from rich.console import Console

from prefixkit.cli.progress import Meter


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def meter_of(samples, max_new_tokens, clock):
    return Meter(samples, max_new_tokens, Console(file=io.StringIO(), width=100), clock)


def test_speed_counts_from_the_first_token(clock):
    meter = meter_of(4, 10, clock)
    assert str(meter) == "computing the prompts"
    clock.now += 60  # the prompts took a minute
    meter.count_tokens(1)
    assert str(meter) == "0/4 samples  0 tokens/s  ETA -:--"
    clock.now += 2
    for _ in range(9):
        meter.count_tokens(1)
    assert str(meter) == "0/4 samples  5 tokens/s  ETA 0:06"  # 30 of 40 tokens at 5 a second


def test_a_sample_that_stops_early_counts_as_done(clock):
    meter = meter_of(2, 100, clock)
    meter.count_tokens(1)
    clock.now += 90
    meter.count_sample(length=1)
    assert str(meter) == "1/2 samples  0 tokens/s  ETA 1:30"


def test_the_bar_shows_the_last_state(clock):
    with meter_of(1, 2, clock) as meter:
        meter.count_tokens(1)
        clock.now += 0.5
        meter.count_tokens(1)
        meter.count_sample(2)
    shown = meter.console.file.getvalue()
    assert "━" * 30 in shown
    assert "1/1 samples  4 tokens/s  ETA 0:00" in shown
