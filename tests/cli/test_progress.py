"""What the bar says, with a clock of the test's own."""

import io

import pytest
from rich.console import Console

from prefixkit.cli.progress import Count, Meter


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def meter_of(samples, max_new_tokens, clock):
    meter = Meter(Console(file=io.StringIO(), width=100), clock=clock)
    meter.expect(0, samples, max_new_tokens)
    return meter


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
    assert "━" * 24 in shown
    assert "1/1 samples  4 tokens/s  ETA 0:00" in shown


def test_the_whole_line_is_shown_in_eighty_columns(clock):
    console = Console(file=io.StringIO(), width=80)
    with Meter(console, condition=lambda: "KV 12,112 MiB, 94% shared", clock=clock) as meter:
        meter.expect(0, 131_200, 1)
        meter.count_tokens(1)
    assert "0/131,200 samples  0 tokens/s  ETA -:--  KV 12,112 MiB, 94% shared" in console.file.getvalue()


def test_samples_that_were_there_before_are_counted_and_take_no_time(clock):
    meter = meter_of(2, 10, clock)
    meter.expect(5, 2, 10)
    meter.count_tokens(1)
    clock.now += 1
    meter.count_tokens(9)
    meter.count_sample(10)
    assert str(meter) == "6/7 samples  10 tokens/s  ETA 0:01"
    clock.now += 7200
    assert str(meter).endswith("ETA 2:00:01")


def test_a_condition_is_said_and_quiet_draws_nothing(clock):
    console = Console(file=io.StringIO(), width=120)
    with Meter(console, condition=lambda: "KV 3 MiB", clock=clock) as meter:
        meter.expect(0, 1, 1)
        meter.count_tokens(1)
        assert str(meter).endswith("  KV 3 MiB")
    with Meter(Console(file=io.StringIO()), quiet=True, clock=clock) as meter:
        meter.count_tokens(1)
    assert meter.console.file.getvalue() == ""


def test_verdicts_are_counted():
    console = Console(file=io.StringIO(), width=120)
    with Count(3, console) as bar:
        bar.count(True)
        bar.count(False)
    assert "2/3 judged, 1 passed" in console.file.getvalue()
