"""APPS (Hendrycks et al., 2021, arXiv:2105.09938): programs, or functions, with inputs and outputs in a JSON string."""

from __future__ import annotations

from typing import Any

from prefixkit.evaluation.tasks.fields import decoded, identity, string
from prefixkit.evaluation.tasks.formats.contest import call_problem, stream_problem
from prefixkit.evaluation.tasks.problem import Calls, Language, Problem, Streams
from prefixkit.evaluation.tasks.records import Record

FIELDS = ("question", "input_output")


def read(record: Record, language: Language = "python") -> Problem:
    statement, starter = string(record, "question"), string(record, "starter_code", "")
    data, solution = decoded(record, "input_output", dict), decoded(record, "solutions", list)
    key, first = identity(record, "problem_id", "id", "task_id"), str(solution[0]) if solution else ""
    inputs, outputs = (data.get(name, []) for name in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"{record.where}: input_output must hold lists inputs and outputs of one length")
    if name := data.get("fn_name"):
        where = f"Solution.{name}" if "class Solution" in f"{starter}\n{first}" else str(name)
        tests = Calls(where, tuple(zip(map(_arguments, inputs), _unwrapped(outputs), strict=True)))
        return call_problem(record, key, statement, starter, tests if inputs else None, where, first)
    cases = tuple((_stream(record, a), _stream(record, b)) for a, b in zip(inputs, outputs, strict=True))
    own = first if language == "python" else ""  # all of its solutions are Python
    return stream_problem(record, key, statement, language, Streams(cases) if cases else None, own)


def _arguments(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, list) else (given,)


def _unwrapped(outputs: list[Any]) -> list[Any]:
    """The result of each call.

    The data set puts most results in a list of one; if all outputs are lists of one, each result is the one item.
    """
    wrapped = all(isinstance(one, list) and len(one) == 1 for one in outputs)
    return [one[0] for one in outputs] if wrapped else outputs


def _stream(record: Record, given: Any) -> str:
    """A text, or its lines."""
    if isinstance(given, list) and all(isinstance(line, str) for line in given):
        return "\n".join(given)
    if not isinstance(given, str):
        raise ValueError(f"{record.where}: input_output must hold texts or lists of lines, got {type(given).__name__}")
    return given
