"""prefixkit's own form: prompts, conversations, tests, limits, and examples of a problem's own."""

import pytest

from prefixkit.evaluation.tasks.problem import Calls, Checks, Limits, Oracle, Streams
from prefixkit.evaluation.tasks.wording import FUNCTION_STOP
from tests.evaluation.tasks.formats.lines import read

USER = {"role": "user", "content": "Hi"}


def own(**fields):
    return {"id": "a", "prompt": "Hi"} | fields


def test_a_prompt_is_a_text_and_a_message():
    problem = read(own())
    assert (problem.text, problem.messages) == ("Hi", (USER,))
    assert problem.chat_stop == problem.text_stop == ()


def test_a_conversation_has_no_text_unless_a_prompt_is_there_too():
    messages = [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "Well,"}]
    problem = read({"id": "a", "messages": messages})
    assert (list(problem.messages), problem.text) == (messages, "")
    assert read({"id": "a", "messages": messages, "prompt": "Hi"}).text == "Hi"


def test_null_is_as_an_absent_field():
    """As in rows of a table, which have all columns."""
    optional = ("params", "tests", "limits", "name", "head", "language", "solution", "examples", "messages")
    assert read(own(**dict.fromkeys(optional))) == read(own())
    assert read(own(prompt=None, messages=[USER])) == read({"id": "a", "messages": [USER]})
    shown = {"prompt": "1 + 1 =", "solution": "2"}
    absent = dict.fromkeys(("answer", "messages", "language"))
    assert read(own(examples=[shown | absent])) == read(own(examples=[shown]))


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ("Hi", "messages must be a list, got str"),
        ([{"role": "user"}], 'message 1 must be an object with "role" and "content"'),
        ([{"role": "robot", "content": "Hi"}], "message 1: role must be one of system, .*, got 'robot'"),
        ([{"role": "user", "content": ["Hi"]}], "message 1: content must be a string, got list"),
        ([USER, {"role": "assistant", "content": ""}], "message 2: the content is empty"),
        ([USER, {"role": "system", "content": "Be kind."}], "a system message must be the first"),
        ([{"role": "system", "content": "Be kind."}], "nothing is asked after the system message"),
    ],
)
def test_a_conversation_that_is_none(messages, says):
    with pytest.raises(ValueError, match=f"file:3: {says}"):
        read({"id": "a", "messages": messages})


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ({"kind": "calls", "name": "f", "cases": [[[1, [2]], 3]]}, Calls("f", (((1, [2]), 3),))),
        ({"kind": "calls", "name": "f", "cases": [[[], None]], "tolerance": 0.5}, Calls("f", (((), None),), 0.5)),
        ({"kind": "streams", "cases": [["1", "2"]]}, Streams((("1", "2"),))),
        (
            {"kind": "streams", "cases": [["1", "2"]], "compare": "numbers", "tolerance": 1e-6},
            Streams((("1", "2"),), "numbers", 1e-6),
        ),
        ({"kind": "checks", "code": "assert f()", "names": ["f"]}, Checks("assert f()", ("f",))),
        (
            {"kind": "oracle", "name": "f", "solution": "def f(): ...", "inputs": [[]]},
            Oracle("f", "def f(): ...", ((),)),
        ),
    ],
)
def test_tests(tests, expected):
    problem = read(own(tests=tests))
    assert problem.tests == expected
    assert problem.name == ("" if tests["kind"] == "streams" else "f")


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ({"kind": "vibes"}, "kind must be one of checks, calls, streams, oracle, got 'vibes'"),
        ({"kind": "calls", "name": "f"}, r"cases must be a list of pairs \[\[argument, ...\], expected\]"),
        ({"kind": "calls", "cases": [[[1], 2]]}, "the field 'name' is missing"),
        ({"kind": "calls", "name": " ", "cases": [[[1], 2]]}, "name is empty"),
        ({"kind": "calls", "name": "a b", "cases": [[[1], 2]]}, "'a b' is no name of a Python function"),
        (
            {"kind": "oracle", "name": "f()", "solution": "x", "inputs": [[]]},
            r"'f\(\)' is no name of a Python function",
        ),
        ({"kind": "checks", "code": "assert f()", "names": ["f", ""]}, "'' is no name of a Python function"),
        ({"kind": "calls", "name": "f", "cases": [[1, 2]]}, "the arguments of a case must be a list, got int"),
        ({"kind": "calls", "name": "f", "cases": [[[1]]]}, "case 1 must be a pair"),
        (
            {"kind": "calls", "name": "f", "cases": [[[1], 2]], "tolerance": -1},
            "tolerance must be a number of at least 0",
        ),
        ({"kind": "calls", "name": "f", "cases": [[[1], 2]], "time": 1}, "tests of kind 'calls' has no field 'time'"),
        ({"kind": "streams", "cases": [[1, 2]]}, "cases must hold pairs of strings"),
        (
            {"kind": "streams", "cases": [["1", "2"]], "compare": "fuzzy"},
            "compare must be one of exact, tokens, numbers",
        ),
        ({"kind": "checks", "code": "assert f()", "names": []}, "names must list the functions"),
        ({"kind": "oracle", "name": "f", "solution": "x", "inputs": [1]}, "each of inputs must be a list, got int"),
        ({"kind": "oracle", "name": "f", "solution": "x", "inputs": []}, "inputs must be a list of argument lists"),
    ],
)
def test_tests_that_are_none(tests, says):
    with pytest.raises(ValueError, match=f"file:3: tests: {says}"):
        read(own(tests=tests))


def test_tests_that_call_python_are_not_for_cpp():
    calls = {"kind": "calls", "name": "f", "cases": [[[1], 2]]}
    with pytest.raises(
        ValueError, match='file:3: tests that call Python cannot judge cpp; give tests of kind "streams"'
    ):
        read(own(tests=calls, language="cpp"))
    assert read(own(tests={"kind": "streams", "cases": [["1", "2"]]}, language="cpp")).language == "cpp"
    with pytest.raises(ValueError, match="file:3: language must be one of python, cpp, got 'ruby'"):
        read(own(language="ruby"))


def test_limits():
    assert read(own(limits={"seconds": 2, "memory": 64})).limits == Limits(2.0, 64, Limits().output)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"seconds": 0}, "seconds must be a number above 0 and at most 86,400, got 0"),
        ({"memory": 1.5}, "memory must be an integer above 0 and at most 1,048,576, got 1.5"),
        ({"output": True}, "output must be an integer above 0 and at most 1,048,576, got True"),
        ({"seconds": 1e9}, "seconds must be a number above 0 and at most 86,400, got 1000000000.0"),
        ({"memory": 2**40}, "memory must be an integer above 0 and at most 1,048,576, got 1099511627776"),
        ({"second": 1}, "limits has no field 'second'; its fields are seconds, memory, output"),
    ],
)
def test_limits_that_are_none(limits, says):
    with pytest.raises(ValueError, match=f"file:3: limits: {says}"):
        read(own(limits=limits))


def test_a_prompt_that_ends_with_a_head_is_a_function_to_complete():
    problem = read(own(prompt="# Task\ndef f(x):\n", head="def f(x):\n", name="f"))
    assert problem.text_stop == FUNCTION_STOP


def test_examples_of_its_own():
    examples = [
        {"prompt": "1 + 1 =", "answer": " 2"},
        {"prompt": "Print 1.", "solution": "print(1)"},
        {"messages": [USER, {"role": "assistant", "content": "Hello"}]},
    ]
    first, second, third = read(own(examples=examples)).examples
    assert first.text == "1 + 1 = 2\n\n"
    assert second.messages[1]["content"] == "```python\nprint(1)\n```"
    assert second.text == "Print 1.\nprint(1)\n\n"
    assert (len(third.messages), third.text) == (2, "")


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        ("x", "examples must be a list, got str"),
        (["x"], "example 1 must be an object, got str"),
        ([{"prompt": "a"}], 'example 1 must have "prompt" and "answer"'),
        ([{"prompt": "a", "answer": "b"}, {"answer": "b"}], "example 2: the field 'prompt' is missing"),
    ],
)
def test_examples_that_are_none(examples, says):
    with pytest.raises(ValueError, match=f"file:3: {says}"):
        read(own(examples=examples))
