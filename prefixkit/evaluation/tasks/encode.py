"""From problems to token ids: through the tokenizer's chat template, or as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prefixkit.evaluation.tasks.problem import Message, Problem


def uses_chat(tokenizer: Any, wanted: bool | None) -> bool:
    """Whether prompts go through the chat template: as asked, else if the tokenizer has one."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if wanted and not has_template:
        raise ValueError("--chat was given, but this tokenizer has no chat template; leave it out, or give --no-chat")
    return has_template if wanted is None else wanted


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template, up to the point where the model continues.

    If the last message is the assistant's, it is a begun answer, which the model continues.  After any other message
    the model starts an answer.

    Raises:
        ValueError: the template refuses the conversation, as some do a system message.
    """
    from jinja2 import TemplateError

    begun = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
        )
    except TemplateError as error:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ValueError(
            f"the tokenizer's chat template refuses these messages ({error}; their roles: {roles}); "
            "leave out the role that it does not know, or give --no-chat"
        ) from error
    # The template writes the special tokens itself.
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def encode(tokenizer: Any, problem: Problem, chat: bool) -> list[int]:
    """Token ids of a problem's prompt.

    Args:
        chat: Encode its messages, through the chat template; otherwise its text, with the special tokens with which
            texts begin.

    Raises:
        ValueError: the problem has no text, the template refuses its messages, or the prompt has no tokens.
    """
    if not chat and not problem.text:
        raise ValueError(
            f"{problem.where}: a conversation alone, or examples that are, cannot be put as text; use a model with a "
            'chat template, or give a "prompt" (examples: "prompt" and "answer") too'
        )
    try:
        tokens = encode_messages(tokenizer, problem.messages) if chat else tokenizer(problem.text)["input_ids"]
    except ValueError as error:
        raise ValueError(f"{problem.where}: {error}") from error
    if not tokens:
        raise ValueError(f"{problem.where}: the tokenizer makes no token of this prompt")
    return [int(token) for token in tokens]


def encode_all(tokenizer: Any, problems: Iterable[Problem], chat: bool) -> dict[str | int, list[int]]:
    """Token ids of each problem's prompt, by its id."""
    return {problem.id: encode(tokenizer, problem, chat) for problem in problems}
