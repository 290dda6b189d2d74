"""Short ways to say what is judged, and judges that lack a protection."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from prefixkit.evaluation.judge import Judge, NoSandbox, Verdict, available
from prefixkit.evaluation.judge.sandbox.cgroup import Cgroup
from prefixkit.evaluation.judge.sandbox.protections import Protections
from prefixkit.evaluation.judge.sandbox.sandbox import Sandbox, cgroups
from prefixkit.evaluation.tasks.problem import Calls, Checks, Limits, Problem, Streams, Tests


@functools.cache
def missing() -> str:
    """Why there can be no sandbox here; "" where there can."""
    try:
        available()
    except NoSandbox as error:
        return str(error)
    return ""


def needs_sandbox() -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(missing()), reason=missing() or "-")


def needs_cgroups() -> pytest.MarkDecorator:
    without = bool(missing()) or cgroups() is None
    return pytest.mark.skipif(without, reason="no cgroups for memory and processes that can be written here")


@functools.cache
def judge(*without: str) -> Judge:
    """A judge, whose sandboxes lack the named protections."""
    return Judge(jobs=1, sandbox=Sandbox(Protections(**dict.fromkeys(without, False))))


def problem(tests: Tests | None, language: Any = "python", **limits: Any) -> Problem:
    return Problem("p", "problems.jsonl:1", (), "", tests=tests, language=language, limits=Limits(**limits))


def streams(*cases: tuple[str, str], **options: Any) -> Streams:
    return Streams(cases, **options)


def calls(name: str, *cases: tuple[tuple[Any, ...], Any], **options: Any) -> Calls:
    return Calls(name, cases, **options)


def checks(code: str, *names: str, setup: str = "") -> Checks:
    return Checks(textwrap.dedent(code), names, setup)


def verdict(program: str, tests: Tests, *without: str, language: Any = "python", **limits: Any) -> Verdict:
    """What a program, indented as it may be, comes to."""
    return judge(*without).verdict(textwrap.dedent(program), problem(tests, language, **limits))


def naive(program: str, tests: Checks) -> bool:
    """Whether a judge that runs program and tests in one process lets a program pass."""
    source = f"{tests.setup}\n{textwrap.dedent(program)}\n{tests.code}\n"
    command = [sys.executable, "-I", "-S", "-c", "import sys; exec(sys.stdin.read())"]
    return subprocess.run(command, input=source.encode(), capture_output=True, timeout=120).returncode == 0


def inside(cgroup: Cgroup, script: str) -> list[str]:
    """A command that enters a cgroup, then runs a script."""
    files = [str(file) for file in cgroup.entrances()]
    enter = "".join(f'echo 0 > "${number}" && ' for number in range(1, len(files) + 1))
    return ["sh", "-c", f"{enter}{script}", "sh", *files]
