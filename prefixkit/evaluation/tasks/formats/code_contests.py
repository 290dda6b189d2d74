"""CodeContests (Li et al., 2022, arXiv:2203.07814): programs, with tests of three origins and limits of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prefixkit.evaluation.tasks.fields import identity, mapping, number, string
from prefixkit.evaluation.tasks.formats.contest import stream_problem
from prefixkit.evaluation.tasks.formats.tests import limits
from prefixkit.evaluation.tasks.problem import Language, Limits, Problem, Streams
from prefixkit.evaluation.tasks.records import Record

FIELDS = ("description", "public_tests")

_TESTS = ("public_tests", "private_tests", "generated_tests")
_LANGUAGES: Mapping[Language, int] = {"cpp": 2, "python": 3}  # by the data set's numbers; 3 is Python 3
_MIB = 2**20


def read(record: Record, language: Language = "python") -> Problem:
    cases = tuple(case for name in _TESTS for case in _cases(record, name))
    return stream_problem(
        record,
        identity(record, "name", "id"),
        string(record, "description"),
        language,
        Streams(cases) if cases else None,
        _solution(record, language),
        _limits(record),
    )


def _cases(record: Record, name: str) -> list[tuple[str, str]]:
    tests = mapping(record, name)
    inputs, outputs = (list(tests.get(side) or ()) for side in ("input", "output"))
    if len(inputs) != len(outputs) or not all(isinstance(text, str) for text in (*inputs, *outputs)):
        raise ValueError(f"{record.where}: {name} must hold lists of texts, input and output, of one length")
    return list(zip(inputs, outputs, strict=True))


def _limits(record: Record) -> Limits:
    """The contest's limits; prefixkit's if the data set has none (null or 0)."""
    time = Record(f"{record.where}: time_limit", record.place, mapping(record, "time_limit"))
    seconds = number(time, "seconds") + number(time, "nanos") / 1e9
    found = {"seconds": seconds, "memory": math.ceil(number(record, "memory_limit_bytes") / _MIB)}
    return limits(record, **{name: value for name, value in found.items() if value})


def _solution(record: Record, language: Language) -> str:
    """The shortest solution in this language; "" where there is none."""
    given = mapping(record, "solutions")
    texts, kinds = list(given.get("solution") or ()), list(given.get("language") or ())
    if len(texts) != len(kinds) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{record.where}: solutions must hold lists solution (texts) and language of one length")
    mine = [text for text, kind in zip(texts, kinds, strict=True) if kind == _LANGUAGES[language]]
    return min(mine, key=len, default="")
