"""Judges by test code, which runs in a second sandbox and asks the candidate through the judge."""

from __future__ import annotations

from prefixkit.evaluation.judge import wire
from prefixkit.evaluation.judge.ends import Judged, Over, line
from prefixkit.evaluation.judge.judge_errors import BadTests
from prefixkit.evaluation.judge.kinds.dialogue import Answers, heard
from prefixkit.evaluation.judge.sandbox.process import Process
from prefixkit.evaluation.judge.sandbox.sandbox import Sandbox
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.tasks.problem import Checks, Limits

MESSAGES = 200_000  # the most questions in one run
QUESTION = b"?"  # the first byte of a message from the tests to the candidate; other messages are their verdict


def judge_checks(sandbox: Sandbox, program: str, tests: Checks, limits: Limits) -> Judged:
    """The verdict on a program by :class:`Checks`.

    Raises:
        Over: the candidate or the tests end before there is a verdict.
        BadTests: the tests do not parse, or their setup raises an exception, ends or exceeds a limit.
    """
    testing = {"program": tests.code, "setup": tests.setup, "names": tests.names}
    with (
        sandbox.start("answering", {"program": program, "names": tests.names}, limits) as candidate,
        sandbox.start("testing", testing, limits) as checker,
    ):
        # Pass questions and answers on until the tests are done; the judge reads the candidate's messages first.
        answers = Answers(candidate, limits, [checker])
        answers.load()
        try:
            _prepare(checker, limits)
        except BadTests as error:
            if error.delayed:  # perhaps by the candidate
                candidate.close()
                with sandbox.start("testing", testing, limits) as another:
                    _prepare(another, limits)
                raise Over(Judged(Verdict("timeout", None, f"more than {limits.seconds:g} s"), delayed=True)) from None
            raise
        checker.send(answers.last)
        for _ in range(MESSAGES):
            told = heard(checker, [candidate, checker], limits)
            if not told.startswith(QUESTION):
                return _verdict(wire.read(told[1:]))
            answers.ask(told[1:], None)
            checker.send(answers.last)
    return Judged(Verdict("output", None, f"more than {MESSAGES} calls"))


def _prepare(checker: Process, limits: Limits) -> None:
    """Wait until the setup of the tests has run, which takes nothing from the candidate.

    Raises:
        BadTests: the tests do not parse, or their setup does not run.
    """
    try:
        told = wire.read(heard(checker, [checker], limits)[1:])
    except Over as over:
        end = over.judged.verdict
        error = BadTests(f"the tests do not run: their setup ended by {end.outcome}: {line(end.detail)}")
        error.delayed = over.judged.delayed
        raise error from None
    if told[0] != "ready":
        raise BadTests(f"the tests do not run: {line(told[1])}")


def _verdict(told: list[str]) -> Judged:
    kind, detail = told
    if kind == "passed":
        return Judged(Verdict("passed"))
    return Judged(Verdict("error" if kind == "error" else "failed", None, line(detail)))
