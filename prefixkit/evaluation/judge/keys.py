"""The key of a verdict: a hash of everything that decides it."""

from __future__ import annotations

import hashlib
import json
import platform

from prefixkit.evaluation.tasks.problem import Problem

VERSION = 4  # the judge's version, raised when a change may change verdicts


def digest_of(problem: Problem) -> bytes:
    """A hash, 32 bytes, of everything but the program that decides the verdicts on a problem's programs.

    That is the tests, the limits, the language, the version of the judge, and for Python that of Python; not the
    problem's id.

    Raises:
        ValueError: the problem has no tests.
    """
    if problem.tests is None:
        raise ValueError(f"{problem.where}: problem {problem.id!r} has no tests to judge by")
    python = platform.python_version() if problem.language == "python" else ""
    tests = [type(problem.tests).__name__, vars(problem.tests), vars(problem.limits)]
    parts = [VERSION, problem.language, python, *tests]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=_other).encode()).digest()


def key_of(program: str, problem: Problem, digest: bytes | None = None) -> str:
    """SHA-256, in hexadecimal, of everything that decides the verdict on a program.

    Args:
        program: The candidate.
        problem: Its problem, with tests.
        digest: The result of :func:`digest_of` for the problem, if known.

    Raises:
        ValueError: the problem has no tests.
    """
    return hashlib.sha256((digest or digest_of(problem)) + json.dumps(program).encode()).hexdigest()


def _other(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, *sorted(map(repr, value))]
    return [type(value).__name__, repr(value)]
