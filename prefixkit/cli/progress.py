"""How far a run is: samples finished, tokens per second, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Meter(Progress):
    """A bar, redrawn by a thread of rich's while its ``with`` block runs; counting costs the run next to nothing.

    A sample that stops before ``max_new_tokens`` has its rest counted as done.
    """

    def __init__(
        self,
        samples_wanted: int,
        max_new_tokens: int,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        text = TextColumn("{task.description}", markup=False)
        super().__init__(SpinnerColumn(), BarColumn(bar_width=30), TimeElapsedColumn(), text, console=console)
        self._clock, self._first_token_at = clock, -1.0
        self._samples_wanted, self._max_new_tokens = samples_wanted, max_new_tokens
        self._finished = self._sampled = self._spared = 0
        self.add_task("", total=samples_wanted * max_new_tokens)

    def count_tokens(self, count: int) -> None:
        """So many more tokens have been sampled."""
        if not self._sampled:
            self._first_token_at = self._clock()  # the prompts are computed by now: speed is that of decoding
        self._sampled += count

    def count_sample(self, length: int) -> None:
        """A sample of ``length`` tokens has finished."""
        self._finished += 1
        self._spared += self._max_new_tokens - length

    def get_renderables(self) -> Iterable[RenderableType]:
        """What rich asks for at each redrawing."""
        for task in self.task_ids:
            self.update(task, completed=self._sampled + self._spared, description=str(self))
        return super().get_renderables()

    def __str__(self) -> str:
        if not self._sampled:
            return "computing the prompts"
        elapsed, done = self._clock() - self._first_token_at, self._sampled + self._spared
        speed, eta = 0.0, "-:--"
        if elapsed:
            speed = self._sampled / elapsed
            left = int(elapsed * (self._samples_wanted * self._max_new_tokens / done - 1))
            eta = f"{left // 60}:{left % 60:02}"
        return f"{self._finished}/{self._samples_wanted} samples  {speed:,.0f} tokens/s  ETA {eta}"
