"""How far a run is: samples finished, tokens per second, time left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

REFRESH_SECONDS = 0.1


@dataclass
class Meter:
    """Counts what a run has drawn.

    Attributes:
        samples_wanted: Samples in all.
        max_new_tokens: Tokens of a sample at most; one that stops earlier has its rest counted as done.
        clock: Seconds, from any origin.
    """

    samples_wanted: int
    max_new_tokens: int
    clock: Callable[[], float] = time.perf_counter
    tokens: int = 0
    samples: int = 0
    _spared: int = 0
    _first: float | None = None

    def draw(self, count: int) -> None:
        """So many tokens have been drawn."""
        if self._first is None:
            self._first = self.clock()  # the prompts are computed by now: speed is that of decoding
        self.tokens += count

    def sample(self, length: int) -> None:
        """A sample of ``length`` tokens has finished."""
        self.samples += 1
        self._spared += self.max_new_tokens - length

    @property
    def done(self) -> float:
        """The finished part of the work, 0 to 1."""
        return (self.tokens + self._spared) / (self.samples_wanted * self.max_new_tokens)

    @property
    def tokens_per_second(self) -> float:
        elapsed = self._elapsed()
        return self.tokens / elapsed if elapsed else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time left at the present speed; None before anything is known."""
        elapsed = self._elapsed()
        return elapsed * (1 - self.done) / self.done if elapsed and self.done else None

    def _elapsed(self) -> float:
        return 0.0 if self._first is None else self.clock() - self._first

    def __str__(self) -> str:
        if self._first is None:
            return "computing the prompts"
        left = self.seconds_left
        eta = "-:--" if left is None else f"{int(left) // 60}:{int(left) % 60:02}"
        return f"{self.samples}/{self.samples_wanted} samples  {self.tokens_per_second:,.0f} tokens/s  ETA {eta}"


@dataclass
class LiveMeter:
    """A `Meter` shown as a bar while its ``with`` block runs."""

    meter: Meter
    console: Console
    _bar: Progress = field(init=False)
    _shown: float = 0.0

    def __enter__(self) -> LiveMeter:
        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = Progress(*columns, console=self.console)
        self._task = self._bar.add_task(str(self.meter), total=1.0)
        self._bar.start()
        return self

    def draw(self, count: int) -> None:
        self.meter.draw(count)
        if self.meter.clock() - self._shown > REFRESH_SECONDS:
            self._show()

    def sample(self, length: int) -> None:
        self.meter.sample(length)
        self._show()

    def _show(self) -> None:
        self._shown = self.meter.clock()
        self._bar.update(self._task, completed=self.meter.done, description=str(self.meter))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show()
        self._bar.stop()
