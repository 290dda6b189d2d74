"""Judges by calls: each result comes from the candidate's sandbox and is compared here."""

from __future__ import annotations

from typing import Any

from prefixkit.judge import wire
from prefixkit.judge.ends import Judged, line
from prefixkit.judge.errors import BadTests
from prefixkit.judge.kinds.dialogue import Answers, Over, refused
from prefixkit.judge.kinds.values import equal, shown
from prefixkit.judge.sandbox.sandbox import Sandbox
from prefixkit.judge.verdict import Verdict
from prefixkit.tasks.problem import Calls, Limits


def judge_calls(sandbox: Sandbox, program: str, tests: Calls, limits: Limits) -> Judged:
    """The verdict about a program by :class:`Calls`, which all run in one process, one after another.

    Raises:
        BadTests: arguments are nested too deeply, or too many.
    """
    with sandbox.start("answering", {"program": program, "names": (tests.name,)}, limits) as process:
        answers = Answers(process, limits)
        try:
            answers.load()
            for number, (arguments, expected) in enumerate(tests.cases):
                found = answers.ask(_question(tests.name, arguments, number), number)
                if not (isinstance(found, list) and len(found) == 3 and found[0] == "returned"):
                    return Judged(refused(found, number))
                if not equal(found[1], expected, tests.tolerance):
                    return Judged(Verdict("failed", number, line(f"returned {shown(found[1])}")))
        except Over as over:
            return over.judged
    return Judged(Verdict("passed"))


def _question(name: str, arguments: tuple[Any, ...], number: int) -> bytes:
    try:
        return wire.write(["plain", name, list(arguments), {}])
    except (wire.WireError, RecursionError) as error:
        raise BadTests(f"the arguments of case {number} cannot be passed on: {error}") from None
