"""The progress of a run: samples finished, tokens per second, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Meter(Progress):
    """A bar, which a thread of rich redraws while its ``with`` block runs; counting takes next to no time of the run.

    When a sample stops before ``max_new_tokens``, its remaining tokens are counted as done.

    Args:
        console: Where it is drawn.
        quiet: Whether it is not drawn.
        condition: Gives further text for each redrawing: memory, for instance.
        clock: Gives the time in seconds.
    """

    def __init__(
        self,
        console: Console,
        quiet: bool = False,
        condition: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        text = TextColumn("{task.description}", markup=False)
        super().__init__(SpinnerColumn(), BarColumn(bar_width=24), text, console=console, disable=quiet)
        self._clock, self._condition, self._first_token_at = clock, condition, -1.0
        self.there = self.wanted = self.done = 0
        self._max_new_tokens = 1
        self._sampled = self._spared = 0
        self.add_task("", total=None)

    def expect(self, there: int, wanted: int, max_new_tokens: int) -> None:
        """``there`` samples exist already; ``wanted`` more are sampled now, of at most ``max_new_tokens`` each."""
        self.there, self.wanted, self._max_new_tokens = there, wanted, max_new_tokens

    def count_tokens(self, count: int) -> None:
        """Count tokens that have been sampled."""
        if not self._sampled:
            self._first_token_at = self._clock()  # the prompts are computed by now: speed is that of decoding
        self._sampled += count

    def count_sample(self, length: int) -> None:
        """Count a finished sample of ``length`` tokens."""
        self.done += 1
        self._spared += self._max_new_tokens - length

    def get_renderables(self) -> Iterable[RenderableType]:
        """The lines that rich draws at each redrawing."""
        for task in self.task_ids:
            total = self.wanted * self._max_new_tokens or None
            self.update(task, total=total, completed=self._sampled + self._spared, description=str(self))
        return super().get_renderables()

    def __str__(self) -> str:
        if not self._sampled:
            return "computing the prompts"
        elapsed, done = self._clock() - self._first_token_at, self._sampled + self._spared
        speed, eta = 0.0, "-:--"
        if elapsed:
            speed = self._sampled / elapsed
            left = int(elapsed * (self.wanted * self._max_new_tokens / done - 1))
            minutes, eta = left // 60, f"{left // 60}:{left % 60:02}"
            if minutes >= 60:
                eta = f"{minutes // 60}:{minutes % 60:02}:{left % 60:02}"
        total = f"{self.there + self.done:,}/{self.there + self.wanted:,} samples"
        more = self._condition()
        return f"{total}  {speed:,.0f} tokens/s  ETA {eta}" + (f"  {more}" if more else "")


class Count(Progress):
    """A bar of candidates that are judged.

    Args:
        total: The number of candidates.
        console: Where it is drawn.
        quiet: Whether it is not drawn.
    """

    def __init__(self, total: int, console: Console, quiet: bool = False) -> None:
        text = TextColumn("{task.description}", markup=False)
        columns = SpinnerColumn(), BarColumn(bar_width=24), TimeElapsedColumn(), text
        super().__init__(*columns, console=console, disable=quiet)
        self._total, self.done, self.passed = total, 0, 0
        self._task = self.add_task("", total=total)

    def count(self, passed: bool) -> None:
        """Count one more judged candidate, which passed or not."""
        self.done += 1
        self.passed += passed
        said = f"{self.done:,}/{self._total:,} judged, {self.passed:,} passed"
        self.update(self._task, completed=self.done, description=said)
