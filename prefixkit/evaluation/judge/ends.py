"""Verdicts on programs that ended early."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from prefixkit.evaluation.judge.sandbox.process import Process
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.tasks.problem import Limits

DETAIL = 300  # characters
_BUSY = 0.9  # a program that computed, or could have computed, for this share of its time was not starved


@dataclass(frozen=True)
class Judged:
    """A verdict, and whether it may be due to load on the machine.

    Attributes:
        verdict: The candidate's verdict.
        delayed: Whether the program may have exceeded its time, or been killed, because of other processes.
    """

    verdict: Verdict
    delayed: bool = False


class Over(Exception):
    """The candidate's verdict is known before all tests have run.

    Attributes:
        judged: The verdict.
    """

    def __init__(self, judged: Judged) -> None:
        super().__init__(judged.verdict.outcome)
        self.judged = judged


def line(text: str) -> str:
    """One line of printable characters, at most ``DETAIL``."""
    shown = "".join(char if char.isprintable() else " " for char in text[: 4 * DETAIL])
    return " ".join(shown.split())[:DETAIL]


def ended(process: Process, limits: Limits, case: int | None = None, beside: Sequence[Process] = ()) -> Judged:
    """The verdict on a program that ended, or exceeded a limit, before its last answer."""
    if process.excess == "timeout":
        busy = sum(one.cpu for one in (process, *beside)) >= _BUSY * limits.seconds
        starved = max(one.starved for one in (process, *beside)) > (1 - _BUSY) * limits.seconds
        return Judged(Verdict("timeout", case, f"more than {limits.seconds:g} s"), starved and not busy)
    if process.excess == "output":
        return Judged(Verdict("output", case, f"more than {limits.output} KiB written, or an answer too large"))
    if process.excess == "memory":
        return Judged(Verdict("memory", case, f"more than {limits.memory} MiB"))
    *_, last = "", *process.errors.splitlines()
    status = process.status or 0
    if status == -signal.SIGXCPU:
        return Judged(Verdict("timeout", case, f"more than {limits.seconds:g} s of CPU time"))
    aborted = status < 0 and ("bad_alloc" in last or "bad_array_new_length" in last)
    if aborted or (status >= 0 and last.startswith("MemoryError")):
        return Judged(Verdict("memory", case, f"more than {limits.memory} MiB: {line(last)}"))
    if status < 0:
        detail = f"{_signal(-status)}{': ' if last else ''}{line(last)}"[:DETAIL]
        return Judged(Verdict("crashed", case, detail), process.starved == math.inf)
    if last.split(":")[0] in ("SyntaxError", "IndentationError", "TabError"):
        return Judged(Verdict("invalid", case, line(last)))
    return Judged(Verdict("error", case, line(f"exit status {status}: {last}" if last else f"exit status {status}")))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
