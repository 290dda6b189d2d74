"""Verdicts about programs that ended before they were done."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from prefixkit.judge.sandbox.process import Process
from prefixkit.judge.verdict import Verdict
from prefixkit.tasks.problem import Limits

DETAIL = 300  # characters
_BUSY = 0.9  # a program that computed for this share of its time, or was free to, was not starved


@dataclass(frozen=True)
class Judged:
    """A verdict, and what decides whether it is kept.

    Attributes:
        verdict: What the candidate came to.
        delayed: Whether others than the program may be the reason that it went beyond its time, or was killed.
    """

    verdict: Verdict
    delayed: bool = False


def line(text: str) -> str:
    """One line of printable characters, at most ``DETAIL``."""
    shown = "".join(char if char.isprintable() else " " for char in text[: 4 * DETAIL])
    return " ".join(shown.split())[:DETAIL]


def ended(process: Process, limits: Limits, case: int | None = None, beside: Sequence[Process] = ()) -> Judged:
    """The verdict about a program that has ended, or went beyond a limit, where more was to come."""
    if process.excess == "timeout":
        busy = sum(one.cpu for one in (process, *beside)) >= _BUSY * limits.seconds
        starved = max(one.starved for one in (process, *beside)) > (1 - _BUSY) * limits.seconds
        return Judged(Verdict("timeout", case, f"more than {limits.seconds:g} s"), starved and not busy)
    if process.excess == "output":
        return Judged(Verdict("output", case, f"more than {limits.output} KiB written, or an answer too large"))
    if process.excess == "memory":
        return Judged(Verdict("memory", case, f"more than {limits.memory} MiB"))
    last = last_line(process)
    status = process.status or 0
    memory = Verdict("memory", case, f"more than {limits.memory} MiB: {line(last)}")
    if status < 0:
        if -status == signal.SIGXCPU:
            return Judged(Verdict("timeout", case, f"more than {limits.seconds:g} s of CPU time"))
        if "bad_alloc" in last or "bad_array_new_length" in last:
            return Judged(memory)
        detail = f"{_signal(-status)}{': ' if last else ''}{line(last)}"[:DETAIL]
        return Judged(Verdict("crashed", case, detail), process.starved == math.inf)
    if last.startswith("MemoryError"):
        return Judged(memory)
    if last.split(":")[0] in ("SyntaxError", "IndentationError", "TabError"):
        return Judged(Verdict("invalid", case, line(last)))
    return Judged(Verdict("error", case, line(f"exit status {status}: {last}" if last else f"exit status {status}")))


def ended_together(processes: Sequence[Process], limits: Limits, case: int | None = None) -> Judged:
    """The verdict where one of several programs that wait for each other has ended, or went beyond a limit."""
    over = next((one for one in processes if one.excess), None) or next(one for one in processes if one.ended)
    beside = [process for process in processes if process is not over]
    for process in beside:
        process.measure()
    for process in processes:
        process.close()
    return ended(over, limits, case, beside)


def last_line(process: Process) -> str:
    """The last line that it wrote to standard error."""
    lines = process.errors.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
