"""What the bar says, with a clock of the test's own."""

import io

import pytest
from rich.console import Console

from prefixkit.cli.progress import LiveMeter, Meter


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_speed_counts_from_the_first_token(clock):
    meter = Meter(samples_wanted=4, max_new_tokens=10, clock=clock)
    assert str(meter) == "computing the prompts"
    clock.now += 60  # the prompts took a minute
    meter.draw(1)
    clock.now += 2
    for _ in range(9):
        meter.draw(1)
    assert meter.tokens_per_second == 5
    assert meter.seconds_left == pytest.approx(6)  # 30 of 40 tokens at 5 a second
    assert str(meter) == "0/4 samples  5 tokens/s  ETA 0:06"


def test_a_sample_that_stops_early_counts_as_done(clock):
    meter = Meter(samples_wanted=2, max_new_tokens=100, clock=clock)
    meter.draw(1)
    clock.now += 1
    meter.sample(length=1)
    assert (meter.samples, meter.done) == (1, 0.5)
    assert meter.seconds_left == pytest.approx(1)


def test_all_done_leaves_nothing(clock):
    meter = Meter(samples_wanted=1, max_new_tokens=2, clock=clock)
    meter.draw(1)
    clock.now += 1
    meter.draw(1)
    meter.sample(length=2)
    assert (meter.done, meter.seconds_left) == (1.0, 0.0)


def test_the_bar_shows_the_last_state(clock):
    console = Console(file=io.StringIO(), width=100)
    with LiveMeter(Meter(1, 1, clock), console) as live:
        live.draw(1)
        clock.now += 0.5
        live.sample(1)
    assert "1/1 samples  2 tokens/s  ETA 0:00" in console.file.getvalue()
