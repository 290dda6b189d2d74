"""A conversation as token ids, through the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to where the model goes on.

    A last message of the assistant is an answer begun: the model continues it.  After any other, it starts one.
    """
    begun = messages[-1]["role"] == "assistant"
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
    )
    # The template writes the special tokens itself.
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
