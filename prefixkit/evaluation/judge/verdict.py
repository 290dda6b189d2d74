"""The verdict on a candidate program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["passed", "failed", "error", "timeout", "memory", "output", "crashed", "invalid"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a candidate program.

    Attributes:
        outcome: ``passed``: every test; ``failed``: a wrong result; ``error``: it raised an exception or exited with
            another status than 0; ``timeout``, ``memory``, ``output``: it exceeded a limit; ``crashed``: a signal
            ended it; ``invalid``: it does not parse or compile, or lacks the function that was asked for.
        case: The first test that it did not pass, from 0; None if it passed, or the tests are not numbered.
        detail: A line with details, at most 300 printable characters.
        seconds: Wall time of the run.
    """

    outcome: Outcome
    case: int | None = None
    detail: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"
