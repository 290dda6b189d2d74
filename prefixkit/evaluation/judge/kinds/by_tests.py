"""Judges by test code, which runs in a second sandbox and asks the candidate through the judge."""

from __future__ import annotations

from prefixkit.evaluation.judge import wire
from prefixkit.evaluation.judge.ends import Judged, line
from prefixkit.evaluation.judge.judge_errors import BadTests
from prefixkit.evaluation.judge.kinds.dialogue import Answers, heard
from prefixkit.evaluation.judge.sandbox.sandbox import Sandbox
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.tasks.problem import Checks, Limits

MESSAGES = 200_000  # questions of one run
QUESTION = b"?"  # begins a message of the tests' that is for the candidate; others are their verdict


def judge_checks(sandbox: Sandbox, program: str, tests: Checks, limits: Limits) -> Judged:
    """The verdict about a program by :class:`Checks`.

    Raises:
        Over: the candidate or the tests come to an end before there is a verdict.
        BadTests: the tests do not parse, or what comes before them raises an exception.
    """
    testing = {"program": tests.code, "setup": tests.setup, "names": tests.names}
    with (
        sandbox.start("answering", {"program": program, "names": tests.names}, limits) as candidate,
        sandbox.start("testing", testing, limits) as checker,
    ):
        # Questions and answers are passed on until the tests are done; what the candidate sends is read here first.
        answers = Answers(candidate, limits, [checker])
        answers.load()
        checker.send(answers.last)
        for _ in range(MESSAGES):
            told = heard(checker, [candidate, checker], limits)
            if not told.startswith(QUESTION):
                return _verdict(wire.read(told[1:]))
            answers.ask(told[1:], None)
            checker.send(answers.last)
    return Judged(Verdict("output", None, f"more than {MESSAGES} calls"))


def _verdict(told: list[str]) -> Judged:
    kind, detail = told
    if kind == "passed":
        return Judged(Verdict("passed"))
    if kind == "broken":
        raise BadTests(f"the tests do not run: {line(detail)}")
    return Judged(Verdict("error" if kind == "error" else "failed", None, line(detail)))
