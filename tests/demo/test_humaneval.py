"""HumanEval's problems, and how they are asked."""

import pytest

from prefixkit.demo.humaneval import Problem, chat_messages, choose_examples, load_problems, plain_text

PROBLEMS = [Problem(f"T/{i}", f"def f{i}():\n", "    return 0\n" * length) for i, length in enumerate([5, 1, 3, 1, 2])]


def test_all_164_problems_are_there_in_order():
    problems = load_problems()
    assert [problem.id for problem in problems] == [f"HumanEval/{number}" for number in range(164)]
    assert all(problem.head.endswith("\n") and problem.solution for problem in problems)


def test_the_shortest_solved_problems_are_the_examples():
    assert [example.id for example in choose_examples(PROBLEMS, 3)] == ["T/1", "T/3", "T/4"]
    assert choose_examples(PROBLEMS, 0) == ()


@pytest.mark.parametrize("count", [-1, 5, 6])
def test_more_examples_than_problems_are_refused(count):
    with pytest.raises(ValueError, match="must be 0 to 4"):
        choose_examples(PROBLEMS, count)


def test_a_chat_shows_the_examples_solved_and_begins_the_answer():
    messages = chat_messages(PROBLEMS[0], PROBLEMS[1:3])
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    assert messages[1]["content"] == "```python\ndef f1():\n    return 0\n```"
    assert messages[-1]["content"] == "```python\ndef f0():"


def test_prompts_share_all_that_comes_before_their_own_problem():
    one, other = (plain_text(problem, PROBLEMS[1:3]) for problem in (PROBLEMS[0], PROBLEMS[4]))
    assert one.removesuffix("def f0():") == other.removesuffix("def f4():")
    assert chat_messages(PROBLEMS[0], PROBLEMS[1:3])[:4] == chat_messages(PROBLEMS[4], PROBLEMS[1:3])[:4]
