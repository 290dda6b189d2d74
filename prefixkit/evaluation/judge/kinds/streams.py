"""Judges by standard input and output: a fresh sandbox for each case, whose output is compared here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixkit.evaluation.judge.ends import Judged, ended, line
from prefixkit.evaluation.judge.judge_errors import BadTests
from prefixkit.evaluation.judge.kinds.cpp import compiled
from prefixkit.evaluation.judge.kinds.texts import accepts
from prefixkit.evaluation.judge.kinds.values import shown
from prefixkit.evaluation.judge.sandbox.sandbox import Sandbox
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.tasks.problem import Language, Limits, Streams

_CPP_STACK = 256  # MiB
_MISSING = ("NameError:", "UnboundLocalError:", "ImportError:", "ModuleNotFoundError:")


def judge_streams(sandbox: Sandbox, program: str, language: Language, tests: Streams, limits: Limits) -> Judged:
    """The verdict on a program by :class:`Streams`.

    Raises:
        Over: the program does not compile.
        NoCompiler: the program is in C++, and this machine has no compiler.
        BadTests: the checker does not parse, or raises an exception whatever the program writes.
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
    """Run a checker; returns its reason to refuse, or "".

    Raises:
        BadTests: the checker does not parse, or raises an exception whatever the output.
    """
    given, expected = (text.encode("utf-8", "surrogatepass") for text in texts[:2])
    excess, status, errors = _run_checker(sandbox, checker, (given, expected, texts[2]), limits)
    if excess:
        return f"its checker went beyond a limit: {excess}"
    if status == 0:
        return ""
    if "Traceback (most recent call last):" in errors:
        # An exception may well be how it refuses, or be due to what the candidate wrote.  It is a fault of its own if
        # it comes with the expected output and before any output is read; or, where a name or a module is missing,
        # with other outputs.
        *_, last = errors.splitlines()
        others = (expected, b"0\n" if last.startswith(_MISSING) else None)
        ends = (_run_checker(sandbox, checker, (given, expected, other), limits) for other in others)
        if all(end == ("", status, errors) for end in ends):
            raise BadTests(f"the checker does not run: {line(last)}")
    return f"its checker refused: exit status {status}"


def _run_checker(
    sandbox: Sandbox, checker: str, texts: tuple[bytes, bytes, bytes | None], limits: Limits
) -> tuple[str, int | None, str]:
    """Run a checker, in a sandbox where the texts are files, but for an output of None: then it has the path of none.

    Returns the limit that it exceeded, or ""; its exit status; the end of what it wrote to standard error.
    """
    files = {name: text for name, text in zip(("input", "expected", "output"), texts, strict=True) if text is not None}
    arguments = ["input", "expected", "output" if "output" in files else "none/output"]
    with sandbox.start("program", {"program": checker, "arguments": arguments}, limits, files) as process:
        process.run()
        return process.excess or "", process.status, process.errors
