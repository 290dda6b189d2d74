"""Judges by calls: each result comes from the candidate's sandbox and is compared here."""

from __future__ import annotations

from prefixkit.evaluation.judge import wire
from prefixkit.evaluation.judge.ends import Judged, line
from prefixkit.evaluation.judge.judge_errors import BadTests
from prefixkit.evaluation.judge.kinds.dialogue import Answers, refused
from prefixkit.evaluation.judge.kinds.values import equal, shown
from prefixkit.evaluation.judge.sandbox.sandbox import Sandbox
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.tasks.problem import Calls, Limits


def judge_calls(sandbox: Sandbox, program: str, tests: Calls, limits: Limits) -> Judged:
    """The verdict on a program by :class:`Calls`, which all run in one process, one after another.

    Raises:
        Over: the candidate ends before it has answered.
        BadTests: arguments are nested too deeply, or there are too many.
    """
    with sandbox.start("answering", {"program": program, "names": (tests.name,)}, limits) as process:
        answers = Answers(process, limits)
        answers.load()
        for number, (arguments, expected) in enumerate(tests.cases):
            try:
                question = wire.write(["plain", tests.name, list(arguments), {}])
            except (wire.WireError, RecursionError) as error:
                raise BadTests(f"the arguments of case {number} cannot be passed on: {error}") from None
            found = answers.ask(question, number)
            if not (isinstance(found, list) and len(found) == 3 and found[0] == "returned"):
                return Judged(refused(found, number))
            if not equal(found[1], expected, tests.tolerance):
                return Judged(Verdict("failed", number, line(f"returned {shown(found[1])}")))
    return Judged(Verdict("passed"))
