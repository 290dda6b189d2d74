"""Judges by standard input and output: a fresh sandbox for each case, whose output is compared here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixkit.evaluation.judge.ends import Judged, ended, line
from prefixkit.evaluation.judge.judge_errors import BadTests
from prefixkit.evaluation.judge.kinds.cpp import compiled
from prefixkit.evaluation.judge.kinds.texts import accepts
from prefixkit.evaluation.judge.kinds.values import shown
from prefixkit.evaluation.judge.sandbox.process import Process
from prefixkit.evaluation.judge.sandbox.sandbox import Sandbox
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.tasks.problem import Language, Limits, Streams

_CPP_STACK = 256  # MiB


def judge_streams(sandbox: Sandbox, program: str, language: Language, tests: Streams, limits: Limits) -> Judged:
    """The verdict on a program by :class:`Streams`.

    Raises:
        Over: the program does not compile.
        NoCompiler: the program is in C++, and this machine has no compiler.
        BadTests: the checker does not parse.
    """
    files: dict[str, bytes] = {}
    spec: Mapping[str, Any] = {"program": program}
    if language == "cpp":
        files, spec = {"program": compiled(sandbox, program, limits)}, {"command": ["program"]}
    stack = min(_CPP_STACK, limits.memory // 2) if language == "cpp" else 64
    for number, (given, expected) in enumerate(tests.cases):
        with sandbox.start("program", spec, limits, files, stack=stack) as process:
            process.run(given.encode("utf-8", "surrogatepass"))
            output = bytes(process.heard)
            if process.excess or process.status != 0:
                return ended(process, limits, number)
        wrong = ""
        if tests.checker:
            wrong = _checked(sandbox, tests.checker, (given, expected, output), limits)
        elif not accepts(output, expected, tests.compare, tests.tolerance):
            wrong = f"wrote {shown(output.decode('utf-8', 'replace'))}"
        if wrong:
            return Judged(Verdict("failed", number, line(wrong)))
    return Judged(Verdict("passed"))


def _checked(sandbox: Sandbox, checker: str, texts: tuple[str, str, bytes], limits: Limits) -> str:
    """Run a checker, in a sandbox where the three texts are files; returns its reason to refuse, or ""."""
    given, expected, output = texts
    files = {
        "input": given.encode("utf-8", "surrogatepass"),
        "expected": expected.encode("utf-8", "surrogatepass"),
        "output": output,
    }
    with sandbox.start("program", {"program": checker, "arguments": list(files)}, limits, files) as process:
        process.run()
        if _does_not_parse(process, limits):
            _parse(sandbox, checker, limits)
        if process.excess:
            return f"its checker went beyond a limit: {process.excess}"
        return "" if process.status == 0 else f"its checker refused: exit status {process.status}"


def _does_not_parse(process: Process, limits: Limits) -> bool:
    """Whether a program ended by a syntax error, which may be its own or one of a text that it read."""
    return process.status != 0 and ended(process, limits).verdict.outcome == "invalid"


def _parse(sandbox: Sandbox, checker: str, limits: Limits) -> None:
    """Raise BadTests if a checker does not parse; found without the candidate's output, which could imitate that."""
    with sandbox.start("program", {"program": f"compile({checker!r}, 'the checker', 'exec')"}, limits) as process:
        process.run()
        if _does_not_parse(process, limits):
            *_, last = process.errors.splitlines()
            raise BadTests(f"the checker does not run: {line(last)}")
