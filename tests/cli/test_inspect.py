"""``prefixkit inspect`` on prompts that nobody would write by hand."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command_line import run


def test_prompts_that_each_extend_the_one_before(folders: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": n, "prompt": "x" * n}) + "\n" for n in range(1, 1501)))
    shown = run("inspect", "--model", folders["plain"], "--input", prompts).stdout
    assert "1,500 prompts, 1,125,750 tokens, 1,500 of them distinct" in shown
    assert "1 token  shared by 1,500" in shown


def test_a_terminal_without_these_letters_gets_escapes(folders: dict[str, Path], prompts: Path) -> None:
    shown = run("inspect", "--model", folders["plain"], "--input", prompts, charset="ascii").stdout
    assert "\\u201cdef\\u201d" in shown
