"""MBPP (Austin et al., 2021, arXiv:2108.07732): functions described in a sentence and by three assertions."""

from __future__ import annotations

import ast
from collections.abc import Collection

from prefixkit.evaluation.tasks.fields import identity, string, strings
from prefixkit.evaluation.tasks.problem import Checks, Language, Problem
from prefixkit.evaluation.tasks.python_code import bound_names, parse
from prefixkit.evaluation.tasks.records import Record
from prefixkit.evaluation.tasks.wording import DOCSTRING_STOP, docstring, function_question

FIELDS = ("task_id", "code", "test_list")


def read(record: Record, language: Language = "python") -> Problem:
    """A problem of ``mbpp.jsonl`` (``text``, ``test_setup_code``), of the sanitised file (``prompt``,
    ``test_imports``), or of MBPP+ as a table, whose ``test`` is a program with more tests.
    """
    statement = string(record, "text" if "text" in record.fields else "prompt")
    tests, solution = strings(record, "test_list"), string(record, "code").replace("\r\n", "\n")
    if not tests:
        raise ValueError(f"{record.where}: test_list is empty, so nothing names the function; give one assertion")
    setup, imports = string(record, "test_setup_code", "").replace("\r\n", "\n"), strings(record, "test_imports")
    code = "\n".join((*tests, *strings(record, "challenge_test_list")))
    names = _tested(record, code, solution)
    code = string(record, "test", "") or code
    if made := _uses(setup, bound_names(solution)):  # objects of the candidate's classes: made after it has run
        code, setup, names = f"{setup}\n{code}", "", tuple(dict.fromkeys(names + made))
    shown = "\n".join(tests)
    return Problem(
        id=identity(record, "task_id"),
        where=record.where,
        messages=function_question(statement, shown),
        text=docstring(f"{statement.strip()}\n{shown}"),
        name=names[0],
        tests=Checks(code, names, "\n".join(line for line in (*imports, setup) if line)),
        text_stop=DOCSTRING_STOP,
        solution=solution,
    )


def _uses(code: str, names: Collection[str]) -> tuple[str, ...]:
    """Those of ``names`` that the code uses, in the order of their first use; none if the code is not Python."""
    found = [node for node in ast.walk(parse(code) or ast.Module([], [])) if isinstance(node, ast.Name)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return tuple(dict.fromkeys(node.id for node in found if node.id in names))


def _tested(record: Record, code: str, solution: str) -> tuple[str, ...]:
    """The names of the solution that the tests use, the function that they call first before the others."""
    if parse(code) is None:
        raise ValueError(f"{record.where}: test_list is not Python")
    names = _uses(code, bound_names(solution))
    if not names:
        raise ValueError(f"{record.where}: test_list uses no name that code defines")
    return names
