"""Runs of the command line inside the test's process, and a tiny model in a folder for them."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from prefixkit.cli.app import app
from prefixkit.testing.tiny import byte_tokenizer, tiny_llama


def save_model(folder: Path, chat: bool) -> None:
    """A tiny random model and its tokenizer, as ``from_pretrained`` opens them."""
    tiny_llama().save_pretrained(folder)
    byte_tokenizer(chat).save_pretrained(folder)


def write_prompts(path: Path) -> Path:
    """Three prompts as JSONL; two of them share four tokens."""
    texts: dict[str | int, str] = {"a": "def one():", "b": "def two():", 3: "while True:"}
    path.write_text("".join(json.dumps({"id": key, "prompt": text}) + "\n" for key, text in texts.items()))
    return path


def run(*arguments: object, code: int | None = 0, typed: str = "", charset: str = "utf-8") -> Result:
    """The output of ``prefixkit ARGUMENTS`` in ``charset``, with input ``typed``; the exit status must be ``code``."""
    given = [str(argument) for argument in arguments]
    with _as_in_a_process_of_its_own(), process_arguments("prefixkit", *given):
        result = CliRunner(charset).invoke(app, given, input=typed)
    assert code is None or result.exit_code == code, result.output
    return result


@contextmanager
def _as_in_a_process_of_its_own() -> Iterator[None]:
    """Send the command's messages to standard error, whatever levels and filters other tests have set."""
    with log_levels_of_its_own(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries, in this process or in its threads
        yield


@contextmanager
def process_arguments(*arguments: str) -> Iterator[None]:
    """Give the process these arguments, of which the first is the program's name, and restore its own at the end."""
    own = sys.argv
    sys.argv = [*arguments]
    try:
        yield
    finally:
        sys.argv = own


@contextmanager
def log_levels_of_its_own() -> Iterator[None]:
    """Give loggers the levels of a new process, and restore the earlier levels at the end."""
    loggers = [logging.getLogger(name) for name in (None, "prefixkit")]
    levels = [logger.level for logger in loggers]
    try:
        for logger, level in zip(loggers, (logging.WARNING, logging.NOTSET), strict=True):
            logger.setLevel(level)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]
