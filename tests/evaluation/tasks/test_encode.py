"""From problems to token ids."""

import pytest

from prefixkit.evaluation.tasks.encode import encode, encode_all, encode_messages, uses_chat
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.testing.tiny import byte_tokenizer

CHAT, PLAIN = byte_tokenizer(chat=True), byte_tokenizer()
USER, BEGUN = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}


def test_a_template_is_used_as_asked_else_where_there_is_one():
    assert uses_chat(CHAT, None) and uses_chat(CHAT, True) and not uses_chat(CHAT, False)
    assert not uses_chat(PLAIN, None)
    with pytest.raises(ValueError, match="this tokenizer has no chat template; leave it out, or give --no-chat"):
        uses_chat(PLAIN, True)


def test_an_answer_is_started_or_continued():
    assert CHAT.decode(encode_messages(CHAT, [USER])) == "<user>Hi<assistant>"
    assert CHAT.decode(encode_messages(CHAT, [USER, BEGUN])) == "<user>Hi<assistant>Well,"


def test_a_prompt_is_its_messages_or_its_text():
    problem = Problem("a", "here", (USER,), "Hi there")
    assert CHAT.decode(encode(CHAT, problem, chat=True)) == "<user>Hi<assistant>"
    assert encode_all(PLAIN, [problem], chat=False) == {"a": PLAIN("Hi there")["input_ids"]}


def test_a_conversation_alone_needs_a_template():
    with pytest.raises(ValueError, match=r"file:2: .* use a model with a chat template, or give a \"prompt\""):
        encode(PLAIN, Problem("a", "file:2", (USER,), ""), chat=False)


def test_a_template_that_refuses_a_role_is_an_error_with_file_and_line():
    strict = byte_tokenizer(chat=True)
    strict.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match=r"file:2: the tokenizer's chat template refuses these messages.*System role"):
        encode(strict, Problem("a", "file:2", (USER,), "Hi"), chat=True)
