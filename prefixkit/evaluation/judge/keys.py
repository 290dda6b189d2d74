"""What a verdict depends on, as a key."""

from __future__ import annotations

import hashlib
import json
import platform

from prefixkit.evaluation.tasks.problem import Problem

VERSION = 2  # of the judge: raised where verdicts may come to differ


def digest_of(problem: Problem) -> bytes:
    """What all verdicts about a problem's programs depend on beside the program, as 32 bytes.

    That is the tests, the limits, the language, the version of the judge, and for Python that of Python; not what the
    problem is called.

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
    """SHA-256, in hexadecimal, over all that decides the verdict about a program.

    Args:
        program: The candidate.
        problem: With its tests.
        digest: What :func:`digest_of` gives for the problem, where it is known.

    Raises:
        ValueError: the problem has no tests.
    """
    return hashlib.sha256((digest or digest_of(problem)) + json.dumps(program).encode()).hexdigest()


def _other(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, *sorted(map(repr, value))]
    return [type(value).__name__, repr(value)]
