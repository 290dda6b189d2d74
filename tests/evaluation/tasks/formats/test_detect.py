"""The form of a record is known by its fields."""

import pytest

from prefixkit.evaluation.tasks.problem import Calls, Checks, Oracle, Streams
from tests.evaluation.tasks.formats import lines
from tests.evaluation.tasks.formats.lines import read


@pytest.mark.parametrize(
    ("fields", "form", "tests", "key"),
    [
        (lines.OWN, "prefixkit", type(None), "own"),
        (lines.HUMANEVAL, "humaneval", Checks, "Own/0"),
        (lines.EVALPLUS, "evalplus", Oracle, "Own/0"),
        (lines.MBPP_PLUS, "evalplus", Oracle, "Mbpp/2"),
        (lines.MBPP, "mbpp", Checks, 7),
        (lines.APPS, "apps", Streams, 3),
        (lines.APPS_CALL, "apps", Calls, 3),
        (lines.CODE_CONTESTS, "codecontests", Streams, "1_A. Double"),
        (lines.LIVECODEBENCH, "livecodebench", Streams, "abc_a"),
        (lines.LIVECODEBENCH_CALL, "livecodebench", Calls, "abc_a"),
    ],
)
def test_each_form(fields, form, tests, key):
    problem = read(fields)
    assert problem == read(fields, form)
    assert isinstance(problem.tests, tests)
    assert (problem.id, problem.where) == (key, "file:3")
    assert problem.messages[0]["role"] == "user" and problem.text


def test_humaneval_plus_may_be_read_as_humaneval():
    assert isinstance(read(lines.EVALPLUS, "humaneval").tests, Checks)


def test_fields_of_no_form_are_named():
    with pytest.raises(ValueError, match=r"file:3: expected an object with \"id\" and \"prompt\".*its fields are a, b"):
        read({"a": 1, "b": 2})


def test_a_form_that_was_asked_for_and_is_not_there():
    with pytest.raises(ValueError, match='file:3: expected an object with "task_id" and "code" and "test_list", for'):
        read(lines.OWN, "mbpp")


def test_tests_that_call_python_judge_no_cpp():
    with pytest.raises(ValueError, match="--format mbpp has tests for Python alone"):
        read(lines.MBPP, language="cpp")
