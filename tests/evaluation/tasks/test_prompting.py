"""How problems are asked: HumanEval's, and others behind instructions and examples."""

import pytest

from prefixkit.evaluation.tasks.problem import Example, Problem
from prefixkit.evaluation.tasks.prompting import Prompting, ask, choose_examples, solved
from prefixkit.evaluation.tasks.source import Source, load
from prefixkit.evaluation.tasks.wording import FENCE_STOP, completion


def problem(number, length):
    head = f"def f{number}():\n"
    solution = head + "    return 0\n" * length
    return Problem(
        *(f"T/{number}", "here", completion(head), head.rstrip(), head),
        name=f"f{number}",
        solution=solution,
        chat_stop=FENCE_STOP,
    )


def question(text, **fields):
    return Problem(text, f"file of {text}", ({"role": "user", "content": text},), text, **fields)


def example(text):
    return Example(({"role": "user", "content": text}, {"role": "assistant", "content": "yes"}), f"{text} yes\n\n")


PROBLEMS = [problem(number, length) for number, length in enumerate([5, 1, 3, 1, 2])]
SHOWN = [solved(one) for one in PROBLEMS[1:3]]


def test_all_164_problems_are_there_in_order():
    problems = load(Source(task="humaneval"))
    assert [problem.id for problem in problems] == [f"HumanEval/{number}" for number in range(164)]
    assert all(problem.head.endswith("\n") and problem.solution.startswith(problem.head) for problem in problems)


def test_the_shortest_solved_problems_are_the_examples():
    assert [example.id for example in choose_examples(PROBLEMS, 3)] == ["T/1", "T/3", "T/4"]
    assert choose_examples(PROBLEMS, 0) == ()


@pytest.mark.parametrize("count", [-1, 5, 6])
def test_more_examples_than_problems_are_refused(count):
    with pytest.raises(ValueError, match="must be 0 to 4"):
        choose_examples(PROBLEMS, count)


def test_a_negative_number_of_examples_is_refused():
    with pytest.raises(ValueError, match="--few-shot must be at least 0, got -1"):
        Prompting(few_shot=-1)


def test_a_chat_shows_the_examples_solved_and_begins_the_answer():
    (asked,) = ask(PROBLEMS[:1], Prompting(), SHOWN)
    assert [message["role"] for message in asked.messages] == ["user", "assistant"] * 3
    assert asked.messages[0]["content"] == "Complete this Python function:\n```python\ndef f1():\n```"
    assert asked.messages[1]["content"] == "```python\ndef f1():\n    return 0\n```"
    assert asked.messages[-1]["content"] == "```python\ndef f0():"
    assert asked.chat_stop == FENCE_STOP


def test_prompts_share_all_that_comes_before_their_own_problem():
    one, other = ask([PROBLEMS[0], PROBLEMS[4]], Prompting(), SHOWN)
    assert one.text == "def f1():\n    return 0\n\n\ndef f2():\n" + "    return 0\n" * 3 + "\n\ndef f0():"
    assert one.text.removesuffix("def f0():") == other.text.removesuffix("def f4():")
    assert one.messages[:4] == other.messages[:4]


def test_without_a_begun_answer_the_model_starts_it_and_a_fence_does_not_end_it():
    (asked,) = ask(PROBLEMS[:1], Prompting(prefill=False))
    assert [message["role"] for message in asked.messages] == ["user"]
    assert asked.chat_stop == ()
    assert asked.text == "def f0():", "a text begins the function in any case"


def test_instructions_come_first():
    (asked,) = ask([question("a?")], Prompting(system="Be brief."), [example("b?")])
    assert asked.messages[0] == {"role": "system", "content": "Be brief."}
    assert asked.text == "Be brief.\n\nb? yes\n\na?"


def test_examples_stand_behind_the_instructions_of_a_conversation():
    messages = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "a?"})
    own = Problem("a", "file:3", messages, "")
    (asked,) = ask([own], Prompting(), [example("b?")])
    assert [message["content"] for message in asked.messages] == ["Be kind.", "b?", "yes", "a?"]
    with pytest.raises(ValueError, match="file:3: has a system message of its own; leave out --system"):
        ask([own], Prompting(system="Be brief."))


def test_the_examples_of_problems_are_put_in_one_order_that_shares_most():
    """Those that most problems have come first, whatever order the problems give them in."""
    a, b, c = map(example, "abc")
    asked = ask(
        [question("1", examples=(a, b)), question("2", examples=(c, b)), question("3", examples=(b, c))], Prompting()
    )
    assert [one.text for one in asked] == [
        "b yes\n\na yes\n\n1",
        "b yes\n\nc yes\n\n2",
        "b yes\n\nc yes\n\n3",
    ]
    assert all(one.examples == () for one in asked)


def test_examples_that_are_conversations_alone_leave_no_text():
    (asked,) = ask([question("a?")], Prompting(), [Example(example("b?").messages, "")])
    assert asked.text == ""
    assert len(asked.messages) == 3
