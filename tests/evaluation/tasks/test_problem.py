"""Problems in the files of a run: what is written is what is read."""

import json

import pytest

from prefixkit.evaluation.tasks.problem import Calls, Checks, Example, Limits, Oracle, Problem, Streams

TESTS = [
    None,
    Checks("check(f)", ("f", "g"), "import math"),
    Calls("f", (((1, [2]), {"a": None}), ((), 3.5)), 1e-6),
    Streams((("1\n", "2\n"),), "numbers", 1e-3, "import sys"),
    Oracle("f", "def f(x): return x\n", ((1,), ([2],)), 1e-4, "[tuple(arguments[0])]", "found == expected"),
]


@pytest.mark.parametrize("tests", TESTS)
def test_a_problem_survives_json(tests):
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    problem = Problem(
        *("a", "file:1", messages, "text", "def f():\n", "f", "python", tests, Limits(2.5, 64, 8)),
        *({"n": 2, "stop": ["x"]}, ("\n```",), ("\ndef",), "def f(): pass\n", (Example(messages, "a b"),)),
    )
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


def test_a_field_of_a_later_version_is_named():
    record = Problem("a", "file:1", ({"role": "user", "content": "a"},), "a").to_json()
    with pytest.raises(ValueError, match="no field 'colour'"):
        Problem.from_json(record | {"colour": 1})
