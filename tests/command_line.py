"""Running the command line inside the test's process, and a tiny model in a folder to run it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from prefixkit.cli import app
from tests.tiny import tiny_llama

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"
END, PAD = "<|end|>", "<|pad|>"


def byte_tokenizer(chat: bool) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges; its end of text is the tiny model's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer


def save_model(folder: Path, chat: bool) -> None:
    """A tiny random model and its tokenizer, as ``from_pretrained`` opens them."""
    tiny_llama().save_pretrained(folder)
    byte_tokenizer(chat).save_pretrained(folder)


def run(*arguments: object, code: int = 0, typed: str = "", charset: str = "utf-8") -> Result:
    """What ``prefixkit ARGUMENTS`` wrote in ``charset`` with ``typed`` as its input; its exit status must be ``code``."""
    result = CliRunner(charset).invoke(app, [str(argument) for argument in arguments], input=typed)
    assert result.exit_code == code, result.output
    return result


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]
