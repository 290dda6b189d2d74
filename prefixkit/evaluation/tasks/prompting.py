"""The examples and instructions before problems, in one order, so that prompts share the longest prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prefixkit.evaluation.tasks.problem import Example, Message, Problem
from prefixkit.evaluation.tasks.wording import FENCE_STOP, fenced


@dataclass(frozen=True)
class Prompting:
    """How problems are asked.

    Attributes:
        few_shot: How many solved problems of the same source are shown before each of the others: the shortest ones.
        examples: A file of examples to show before each problem instead.
        system: Instructions before all examples.
        prefill: Whether the data set's begun answers are kept; if not, a model starts its answer itself.
    """

    few_shot: int = 0
    examples: Path | None = None
    system: str = ""
    prefill: bool = True

    def __post_init__(self) -> None:
        if self.few_shot < 0:
            raise ValueError(f"--few-shot must be at least 0, got {self.few_shot}")
        if self.few_shot and self.examples is not None:
            raise ValueError("give either --few-shot K, for solved problems of the task, or --few-shot-file FILE")


def choose_examples(problems: Sequence[Problem], count: int) -> tuple[Problem, ...]:
    """The ``count`` shortest solved problems, in the data set's order, since they cost least to show; ValueError if
    fewer are solved, or no problem would be left to ask.
    """
    if not 0 <= count < len(problems):
        raise ValueError(f"few-shot examples must be 0 to {len(problems) - 1} for this task, not {count}")
    lengths = {index: len(solved(one).text) for index, one in enumerate(problems) if one.solution}
    if count > len(lengths):
        raise ValueError(
            f"--few-shot {count} takes problems with a solution, and {len(lengths)} of the {len(problems)} have one; "
            "give the examples with --few-shot-file FILE"
        )
    shortest = sorted(lengths, key=lambda index: (lengths[index], index))[:count]
    return tuple(problems[index] for index in sorted(shortest))


def solved(problem: Problem) -> Example:
    """A problem and its solution as an example; the solution begins as the problem's answers do."""
    code = problem.solution if problem.solution.endswith("\n") else f"{problem.solution}\n"
    answer: Message = {"role": "assistant", "content": fenced(code, problem.language)}
    head = problem.head.rstrip()
    text = problem.text.removesuffix(head) if head and problem.text.endswith(head) else f"{problem.text}\n"
    return Example((*_question(problem), answer), f"{text}{code}\n\n" if problem.text else "")


def ask(problems: Sequence[Problem], prompting: Prompting, examples: Sequence[Example] = ()) -> tuple[Problem, ...]:
    """The problems with instructions and examples before them.

    Args:
        prompting: Its instructions and ``prefill`` are used.
        examples: Shown before each problem, in this order; a problem's own examples follow, those that most problems
            have first, and equally frequent ones in the order of their first appearance.

    Raises:
        ValueError: a problem has instructions of its own, and ``prompting`` has some too.
    """
    own = [repr(one) for problem in problems for one in problem.examples]
    uses, ranks = Counter(own), {key: rank for rank, key in enumerate(dict.fromkeys(own))}

    def place(one: Example) -> tuple[int, int]:
        return -uses[repr(one)], ranks[repr(one)]

    return tuple(_asked(problem, prompting, (*examples, *sorted(problem.examples, key=place))) for problem in problems)


def shows(example: Example, problem: Problem) -> bool:
    """Whether the example is the answer to this problem."""
    return _question(problem) == example.messages[:-1]


def _asked(problem: Problem, prompting: Prompting, shown: Sequence[Example]) -> Problem:
    messages = problem.messages if prompting.prefill else _without_answer(problem.messages)
    own = messages[:1] if messages[0]["role"] == "system" else ()
    if own and prompting.system:
        raise ValueError(f"{problem.where}: has a system message of its own; leave out --system, or remove the message")
    given: tuple[Message, ...] = ({"role": "system", "content": prompting.system},) if prompting.system else own
    before = f"{prompting.system}\n\n" if prompting.system else ""
    # Problems and examples without text are only for models with a chat template.
    worded = problem.text and all(one.text for one in shown)
    examples = (message for one in shown for message in one.messages)
    begun = messages[-1]["role"] == "assistant"
    return replace(
        problem,
        messages=(*given, *examples, *messages[len(own) :]),
        text=f"{before}{''.join(one.text for one in shown)}{problem.text}" if worded else "",
        chat_stop=problem.chat_stop if begun else tuple(one for one in problem.chat_stop if one not in FENCE_STOP),
        examples=(),
    )


def _question(problem: Problem) -> tuple[Message, ...]:
    return tuple(one for one in _without_answer(problem.messages) if one["role"] != "system")


def _without_answer(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(messages[:-1] if messages[-1]["role"] == "assistant" else messages)
