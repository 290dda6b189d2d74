"""The prompts of a run: lines of a JSONL file, or the problems of a task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixkit.demo import humaneval

TASKS = ("humaneval",)


@dataclass(frozen=True)
class Prompt:
    """One prompt before it meets a tokenizer."""

    id: str | int
    where: str  # file and line, or task, for error messages
    messages: Sequence[humaneval.Message]  # for a model with a chat template
    plain: str  # for one without


@dataclass(frozen=True)
class Source:
    """Which prompts a user asked for, and whether through the chat template (None: where there is one)."""

    input: Path | None = None
    task: str | None = None
    few_shot: int = 0
    limit: int | None = None
    chat: bool | None = None

    def __post_init__(self) -> None:
        if (self.input is None) == (self.task is None):
            raise ValueError("give either --input FILE or --task NAME")
        if self.task is not None and self.task not in TASKS:
            raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {self.task}")
        if self.few_shot and self.task is None:
            raise ValueError("--few-shot takes solved problems from a --task; an --input file has none")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit must be at least 1, got {self.limit}")


def load_prompts(source: Source) -> list[Prompt]:
    """The prompts of ``source``, in order."""
    if source.input is not None:
        return read_prompts(source.input)[: source.limit]
    problems = humaneval.load_problems()
    examples = humaneval.choose_examples(problems, source.few_shot)
    asked = [problem for problem in problems if problem not in examples]  # none sees its own solution
    return task_prompts(asked[: source.limit], examples)


def task_prompts(problems: Sequence[humaneval.Problem], examples: Sequence[humaneval.Problem]) -> list[Prompt]:
    """HumanEval problems, each after the same solved examples."""
    chat, plain = humaneval.chat_messages, humaneval.plain_text
    return [Prompt(asked.id, asked.id, chat(asked, examples), plain(asked, examples)) for asked in problems]


def task_stop(task: str | None, chat: bool) -> tuple[str, ...]:
    """The strings that end an answer of the task."""
    if task is None:
        return ()
    return humaneval.CHAT_STOP if chat else humaneval.PLAIN_STOP


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a file of lines ``{"id": ..., "prompt": ...}``; blank lines are skipped, other keys ignored."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OSError(f"cannot read the prompts in {path}: {error.strerror}") from error
    prompts: list[Prompt] = []
    first_line: dict[str | int, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path}:{number}")
        if prompt.id in first_line:
            raise ValueError(f"{prompt.where}: the id {prompt.id!r} was used in line {first_line[prompt.id]} already")
        first_line[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f'{path} holds no prompts; expected lines like {{"id": "a", "prompt": "..."}}')
    return prompts


def _parse(line: bytes, where: str) -> Prompt:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON object, perhaps torn ({error.msg} at column {error.colno})") from error
    except (RecursionError, ValueError) as error:  # brackets in brackets, or an integer of thousands of digits
        raise ValueError(f"{where}: nested too deeply, or a number too long, for a prompt ({error})") from error
    if not isinstance(record, dict) or not {"id", "prompt"} <= record.keys():
        raise ValueError(f'{where}: expected an object with "id" and "prompt"')
    key, text = record["id"], record["prompt"]
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise ValueError(f"{where}: id must be a string or an integer, got {type(key).__name__}")
    if not isinstance(text, str):
        raise ValueError(f"{where}: prompt must be a string, got {type(text).__name__}")
    if not text:
        raise ValueError(f"{where}: the prompt is empty; give the model at least one character to continue")
    try:
        f"{key}{text}".encode()  # JSON can spell half a surrogate pair, which no file or tokenizer takes
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: holds half a surrogate pair (character {error.start}), which is not text"
        ) from error
    return Prompt(key, where, ({"role": "user", "content": text},), text)


def uses_chat(tokenizer: Any, wanted: bool | None) -> bool:
    """Whether prompts go through the chat template: as asked, else where there is one."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if wanted and not has_template:
        raise ValueError("--chat was given, but this tokenizer has no chat template; leave it out, or give --no-chat")
    return has_template if wanted is None else wanted


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt], chat: bool) -> dict[str | int, list[int]]:
    """Token ids of each prompt, by its id."""
    encoded = {}
    for prompt in prompts:
        tokens = humaneval.encode_messages(tokenizer, prompt.messages) if chat else tokenizer(prompt.plain)["input_ids"]
        if not tokens:
            raise ValueError(f"{prompt.where}: the tokenizer makes no token of this prompt")
        encoded[prompt.id] = [int(token) for token in tokens]
    return encoded
