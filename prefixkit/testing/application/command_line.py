"""Running the command line inside the test's process, and a tiny model in a folder to run it on."""

from __future__ import annotations

import json
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
    """What ``prefixkit ARGUMENTS`` wrote in ``charset`` with ``typed`` as its input; it must exit with ``code``."""
    result = CliRunner(charset).invoke(app, [str(argument) for argument in arguments], input=typed)
    assert code is None or result.exit_code == code, result.output
    return result


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]
