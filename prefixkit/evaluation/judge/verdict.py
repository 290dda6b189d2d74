"""What a candidate program came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["passed", "failed", "error", "timeout", "memory", "output", "crashed", "invalid"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True)
class Verdict:
    """What a candidate program came to.

    Attributes:
        outcome: ``passed``: every test; ``failed``: a wrong result; ``error``: it raised an exception or exited with
            another status than 0; ``timeout``, ``memory``, ``output``: it went beyond a limit; ``crashed``: a signal
            ended it; ``invalid``: it does not parse or compile, or lacks the function that was asked for.
        case: The first test that it did not pass, from 0; None where it passed, or the tests are not numbered.
        detail: A line that says more, at most 300 characters, with nothing in it but what may be shown.
        seconds: Of wall time that it took.
    """

    outcome: Outcome
    case: int | None = None
    detail: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"
