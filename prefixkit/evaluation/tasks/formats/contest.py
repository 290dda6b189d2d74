"""The two kinds of problems of programming contests: a program over streams, and a function that is called."""

from __future__ import annotations

from prefixkit.evaluation.tasks.problem import Calls, Language, Limits, Problem, Streams
from prefixkit.evaluation.tasks.records import Record
from prefixkit.evaluation.tasks.wording import (
    CLASS_STOP,
    FENCE_STOP,
    FUNCTION_STOP,
    PROGRAM_STOP,
    completion,
    docstring,
    program_question,
)

# Lines that such sites put before a solution, which therefore lacks these imports.
_IMPORTS = """\
import bisect, collections, functools, heapq, itertools, math, operator, re, string
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, floor, gcd, inf, log, log2, sqrt
from typing import *
"""


def stream_problem(
    record: Record,
    key: str | int,
    statement: str,
    language: Language,
    tests: Streams | None,
    solution: str = "",
    limits: Limits | None = None,
) -> Problem:
    """A program that reads standard input."""
    return Problem(
        id=key,
        where=record.where,
        messages=program_question(statement, language),
        text=docstring(statement, language),
        language=language,
        tests=tests,
        limits=limits or Limits(),
        text_stop=PROGRAM_STOP[language],
        solution=solution.replace("\r\n", "\n"),
    )


def call_problem(
    record: Record,
    key: str | int,
    statement: str,
    starter: str,
    tests: Calls | None,
    name: str,
    solution: str = "",
) -> Problem:
    """A function, or a method of a class, to write; ``starter``: the beginning of its code, "" if that is left open."""
    head = f"{_IMPORTS}\n{starter.strip()}\n" if starter.strip() else ""
    asked = f"Write the Python function {name} that solves this problem.\n\n{statement.strip()}"
    comment = docstring(statement if head else asked)
    own = solution.replace("\r\n", "\n")
    return Problem(
        id=key,
        where=record.where,
        messages=completion(head, statement) if head else ({"role": "user", "content": asked},),
        text=f"{comment}\n{head.rstrip()}" if head else comment,
        head=head,
        name=name,
        tests=tests,
        chat_stop=FENCE_STOP if head else (),
        text_stop=CLASS_STOP if "." in name else FUNCTION_STOP if head else PROGRAM_STOP["python"],
        solution=f"{_IMPORTS}\n{own}" if head and own else own,
    )
