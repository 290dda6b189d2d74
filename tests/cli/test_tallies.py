"""What is kept of samples for the report, and how a problem's prompt and tests are written."""

import sys

import pytest

from prefixkit.cli.problem_texts import text_of_prompt, text_of_tests
from prefixkit.cli.tallies import Tally, problem_of
from prefixkit.evaluation.report import Draw
from prefixkit.evaluation.tasks.problem import Calls, Checks, Oracle, Problem, Streams


def test_equal_programs_are_one_with_all_their_samples():
    here, there = Tally(room=1000), Tally(room=1000)
    for tally, group, indices in ((here, 0, (4, 1)), (there, 1, (3,))):
        for index in indices:
            tally.add("x = 1", "failed", "why", Draw(index, 5, group))
    there.add("x = 1", "unjudged", "", Draw(9, 5, 1))
    problem = problem_of("a", [here, there])
    assert problem.counts == {"failed": 3, "unjudged": 1} and problem.distinct == 1
    first, second = problem.candidates
    assert first.draws == (Draw(1, 5, 0), Draw(4, 5, 0), Draw(3, 5, 1))
    assert (second.outcome, second.draws) == ("unjudged", (Draw(9, 5, 1),))


def test_programs_that_passed_stand_first_and_frequent_ones_before_rare_ones():
    tally = Tally(room=1000)
    for index, (text, outcome) in enumerate([("a", "failed"), ("b", "failed"), ("b", "failed"), ("c", "passed")]):
        tally.add(text, outcome, "", Draw(index, 1))
    assert [one.text for one in problem_of("a", [tally]).candidates] == ["c", "b", "a"]


def test_where_there_is_no_room_the_first_of_each_outcome_is_kept_and_all_are_counted():
    tally = Tally(room=5)
    for index in range(20):
        tally.add(f"program {index}", "passed" if index == 19 else "failed", "", Draw(index, 1))
    problem = problem_of("a", [tally])
    assert [one.text for one in problem.candidates] == ["program 19", "program 0"]
    assert problem.distinct == problem.samples == 20 and problem.first_solved == 19


def test_a_chat_is_written_with_its_roles():
    messages = ({"role": "system", "content": "Be short.\n"}, {"role": "user", "content": "Add one."})
    problem = Problem("a", "", messages, "def f(x):")
    assert text_of_prompt(problem, chat=False) == "def f(x):"
    assert text_of_prompt(problem, chat=True) == "[system]\nBe short.\n\n[user]\nAdd one.\n"


@pytest.mark.parametrize(
    ("tests", "text"),
    [
        (None, ""),
        (Checks("assert f(1) == 2\n", ("f",), "import math\n"), "import math\nassert f(1) == 2"),
        (Calls("f", (((1, "a"), [2]), ((2, ""), None))), "f(1, 'a') == [2]\nf(2, '') == None"),
        (Calls("f", (((1,), 0.5),), 0.01), "f(1) == 0.5  # within 0.01"),
        (Streams((("1\n", "2\n"),)), "Output is compared as tokens.\n\ninput:\n1\noutput:\n2\n"),
        (
            Streams((("1", "2"),), checker="exit(0)\n"),
            "Output is checked by a program:\nexit(0)\n\ninput:\n1\noutput:\n2\n",
        ),
        (
            Oracle("f", "def f(x): return x\n", ((1,),)),
            "# Each call must return what this solution returns.\ndef f(x): return x\n\nf(1)",
        ),
    ],
)
def test_tests_are_written_as_a_reader_would(tests, text):
    assert text_of_tests(tests) == text


def test_a_setup_that_the_prompt_has_is_left_out():
    head = "def f(x):\n"
    assert text_of_tests(Checks("assert f(1) == 2", ("f",), head), head) == "assert f(1) == 2"


def test_of_very_many_cases_the_first_are_written_and_the_others_counted():
    text = text_of_tests(Calls("f", tuple(((n,), n) for n in range(10_000))))
    last = text.splitlines()[-1]
    shown = len(text.splitlines()) - 1
    assert 20_000 <= len(text) < 21_000 and last == f"… and {10_000 - shown:,} more"


def test_values_that_cannot_be_written_are_said_to_be_so():
    deep = []
    for _ in range(2 * sys.getrecursionlimit()):
        deep = [deep]
    for value in (deep, 10**5000):
        assert text_of_tests(Calls("f", (((value,), 1),))) == "The tests cannot be written as text."
