"""What an experiment asks for: jobs, each over one model shape, done in order of priority while there is time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.hydragen.step import Rig

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One row of results.

    Attributes:
        experiment: Its letter.
        shape: Name of the model shape.
        name: What the row is of.
        priority: 1 comes first; ``--quick`` does only 1.
        seconds: About how long it takes on an H200: decides how time is shared between model shapes.
        run: Does it.
    """

    experiment: str
    shape: str
    name: str
    priority: int
    seconds: float
    run: Callable[[Rig], Row] = field(repr=False)


class Clock:
    """Time that is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


def run_jobs(
    jobs: list[Job],
    rig_of: Callable[[str], Rig],
    seconds: float,
    done: Callable[[Job, Row], None],
    begin_shape: Callable[[Rig], None] = lambda rig: None,
) -> None:
    """Do the jobs, shape after shape so that one model is in memory, each shape within its share of the time.

    A shape's share is by what its jobs are expected to take; what it leaves goes to those after it.  A job that does not begin
    in time gives a row that says so.
    """
    clock = Clock(seconds)
    shapes = list(dict.fromkeys(job.shape for job in jobs))
    for index, shape in enumerate(shapes):
        of_shape = sorted((job for job in jobs if job.shape == shape), key=lambda job: job.priority)
        waiting = sum(job.seconds for job in jobs if job.shape in shapes[index:])
        mine = Clock(clock.left * sum(job.seconds for job in of_shape) / max(waiting, 1e-9))
        if mine.left <= 0:
            for job in of_shape:
                done(job, {"skipped": "out of time"})
            continue
        rig = rig_of(shape)
        try:
            begin_shape(rig)
            for job in of_shape:
                began = time.monotonic()
                row = _attempt(job, rig) if mine.left > 0 else {"skipped": "out of time"}
                done(job, row | {"seconds": round(time.monotonic() - began, 2)})
        finally:
            rig.close()


def _attempt(job: Job, rig: Rig) -> Row:
    try:
        return job.run(rig)
    except Exception as error:  # one job's failure does not keep the others from running
        return {"skipped": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
