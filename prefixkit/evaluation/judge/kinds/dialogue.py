"""The judge's side of a candidate that answers calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixkit.evaluation.judge import wire
from prefixkit.evaluation.judge.ends import Judged, Over, ended, line
from prefixkit.evaluation.judge.sandbox.process import Process, wait
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.tasks.problem import Limits


class Answers:
    """A candidate in its sandbox.

    Args:
        process: The sandbox.
        limits: The run's limits, for messages about them.
        beside: Other sandboxes that run at the same time.

    Attributes:
        last: The last message, which has been read and is well-formed.
    """

    def __init__(self, process: Process, limits: Limits, beside: Sequence[Process] = ()) -> None:
        self._process, self._limits, self._together = process, limits, [process, *beside]
        self.last = b""

    def load(self) -> None:
        """Wait until the candidate's module has run.

        Raises:
            Over: the module does not run, or lacks a name.
        """
        found = self._next([self._process], None)
        if not (isinstance(found, list) and len(found) == 2 and found[0] == "loaded"):
            raise Over(Judged(refused(found, None)))
        names = found[1]
        pairs = names.items if isinstance(names, wire.Unhashed) and names.kind is dict else []
        if missing := [name for name, kind in pairs if kind == ("missing",)]:
            raise Over(Judged(Verdict("invalid", None, line(f"it defines no {_text(missing[0])}"))))

    def ask(self, content: bytes, case: int | None) -> Any:
        """The answer to a message, as :func:`prefixkit.evaluation.judge.wire.read` gives it without hash tables.

        Raises:
            Over: the candidate ends, exceeds a limit, or sends an answer that cannot be read.
        """
        self._process.send(content)
        return self._next(self._together, case)

    def _next(self, together: Sequence[Process], case: int | None) -> Any:
        message = heard(self._process, together, self._limits, case)
        try:
            found = wire.read(message, hashed=False)
        except wire.WireError as error:
            raise Over(Judged(Verdict("error", case, f"its answer cannot be read: {error}"))) from None
        self.last = message
        return found


def heard(speaking: Process, together: Sequence[Process], limits: Limits, case: int | None = None) -> bytes:
    """The next message of one of several programs that wait for each other.

    Raises:
        Over: one of them has ended, or exceeded a limit.
    """
    wait(together, speaking)
    over = next((process for process in together if process.excess), None)
    if over is None and speaking.complete:
        return speaking.message()
    over = over or next(process for process in together if process.ended)
    beside = [process for process in together if process is not over]
    for process in beside:
        process.measure()
    for process in together:
        process.close()
    raise Over(ended(over, limits, case, beside))


def refused(answer: Any, case: int | None) -> Verdict:
    """The verdict on an answer that is no result."""
    kind, rest = (answer[0], answer[1:]) if isinstance(answer, list) and answer else (None, [])
    if kind == "invalid" and rest:
        return Verdict("invalid", case, line(_text(rest[0])))
    if kind == "unfit" and rest:
        return Verdict("output", case, line(f"a result that is too large: {_text(rest[0])}"))
    if kind == "raised" and len(rest) >= 3:
        return Verdict("memory" if rest[0] == "MemoryError" else "error", case, line(_text(rest[2])))
    return Verdict("error", case, "its answer cannot be read: no such answer")


def _text(value: Any) -> str:
    """A value that should be a text, from a sender that may send anything."""
    return value if isinstance(value, str) else "?"
