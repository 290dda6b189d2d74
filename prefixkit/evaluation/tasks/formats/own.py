"""prefixkit's own form: a prompt or a conversation, and, if answers are to be judged, tests and limits."""

from __future__ import annotations

from typing import Any, get_args

from prefixkit.evaluation.tasks.fields import has, identity, items, language, mapping, string
from prefixkit.evaluation.tasks.formats.tests import read_limits, read_tests
from prefixkit.evaluation.tasks.problem import Calls, Checks, Example, Language, Message, Oracle, Problem, Tests
from prefixkit.evaluation.tasks.problem_params import check_params
from prefixkit.evaluation.tasks.records import Record
from prefixkit.evaluation.tasks.wording import FUNCTION_STOP, fenced

FIELDS = ("id", "prompt")
CHAT_FIELDS = ("id", "messages")

ROLES = ("system", "developer", "user", "assistant", "tool")


def read(record: Record, default: Language = "python") -> Problem:
    """A problem of a record: ``prompt`` is the text that a model continues, or a user's message if there is a chat
    template; ``messages`` are a conversation, whose last message may be a begun answer.  If a record has both, models
    with a chat template get ``messages``, and others ``prompt``.
    """
    key, text = identity(record, "id"), _prompt(record)
    messages = read_messages(record) if has(record, "messages") else (Message(role="user", content=text),)
    tests, head = read_tests(record), string(record, "head", "")
    begun = bool(head) and text.rstrip().endswith(head.rstrip())
    return Problem(
        id=key,
        where=record.where,
        messages=messages,
        text=text,
        head=head,
        name=string(record, "name", "") or _tested(tests),
        language=_language(record, default, tests),
        tests=tests,
        limits=read_limits(record),
        params=check_params(record.where, mapping(record, "params")),
        text_stop=FUNCTION_STOP if begun else (),
        solution=string(record, "solution", ""),
        examples=tuple(_inner(record, number, one) for number, one in enumerate(items(record, "examples"), start=1)),
    )


def read_example(record: Record) -> Example | None:
    """A question and its answer: ``prompt`` and ``answer``, or ``messages`` that end with the answer.

    None if the record has neither: then it is a problem, whose solution is the answer.
    """
    if has(record, "answer"):
        text, answer = _prompt(record), string(record, "answer")
        return Example(_exchange(text, answer), f"{text}{answer}\n\n")
    if has(record, "messages") and not has(record, "solution"):
        messages = read_messages(record)
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"{record.where}: an example must end with the assistant's answer")
        return Example(messages, "")
    return None


def _inner(record: Record, number: int, fields: Any) -> Example:
    """An example of a problem's own."""
    where = f"{record.where}: example {number}"
    if not isinstance(fields, dict):
        raise ValueError(f"{where} must be an object, got {type(fields).__name__}")
    inner = Record(where, record.place, fields)
    if not has(inner, "answer") and has(inner, "solution"):
        answer = fenced(string(inner, "solution"), language(inner, "python"))
        text = _prompt(inner)
        return Example(_exchange(text, answer), f"{text}\n{string(inner, 'solution').rstrip()}\n\n")
    if found := read_example(inner):
        return found
    raise ValueError(f'{where} must have "prompt" and "answer", "prompt" and "solution", or "messages"')


def _exchange(question: str, answer: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": question}, {"role": "assistant", "content": answer})


def read_messages(record: Record) -> tuple[Message, ...]:
    """The conversation of a record, checked."""
    given = items(record, "messages")
    if not given:
        raise ValueError(f'{record.where}: messages is empty; give at least {{"role": "user", "content": "..."}}')
    messages = tuple(_message(record, number, one) for number, one in enumerate(given, start=1))
    if any(one["role"] == "system" for one in messages[1:]):
        raise ValueError(f"{record.where}: a system message must be the first")
    if messages[-1]["role"] in ("system", "developer"):
        raise ValueError(f"{record.where}: nothing is asked after the {messages[-1]['role']} message")
    return messages


def _message(record: Record, number: int, given: Any) -> Message:
    where = f"{record.where}: message {number}"
    if not isinstance(given, dict) or not {"role", "content"} <= given.keys():
        raise ValueError(f'{where} must be an object with "role" and "content"')
    role, content = given["role"], string(Record(where, record.place, given), "content")
    if role not in ROLES:
        raise ValueError(f"{where}: role must be one of {', '.join(ROLES)}, got {role!r}")
    if not content:
        raise ValueError(f"{where}: the content is empty; leave the message out")
    return {"role": role, "content": content}


def _prompt(record: Record) -> str:
    """The text of a record; "" if it has only a conversation."""
    if not has(record, "prompt") and has(record, "messages"):
        return ""
    text = string(record, "prompt")
    if not text:
        raise ValueError(f"{record.where}: the prompt is empty; give the model at least one character to continue")
    return text


def _language(record: Record, default: Language, tests: Tests | None) -> Language:
    found = language(record, default)
    if found != "python" and isinstance(tests, get_args(Calls | Checks | Oracle)):
        raise ValueError(
            f'{record.where}: tests that call Python cannot judge {found}; give tests of kind "streams", or '
            '"language": "python"'
        )
    return found


def _tested(tests: Tests | None) -> str:
    """The function that the tests call."""
    if isinstance(tests, Checks):
        return tests.names[0]
    return tests.name if isinstance(tests, Calls | Oracle) else ""
