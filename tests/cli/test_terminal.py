"""What others wrote is shown as it is, and commands no terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from prefixkit.cli.errors import reported
from prefixkit.cli.terminal import line, visible


def printed(*parts: str | tuple[str, str], keep: str = "") -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(line(*parts, keep=keep))
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    return shown.removesuffix("\n")


@pytest.mark.parametrize("text", ["[red]x[/red]", "[/nothing]", ":smile:", "pip install 'prefixkit[cuda]'", "\\[x]"])
def test_markup_is_text(text: str) -> None:
    assert printed(text, (text, "bold")) == text * 2


@pytest.mark.parametrize("code", [0, 7, 8, 13, 27, 127, 0x85, 0x9B, 0x61C, 0x200F, 0x2028, 0x202E, 0x2066, 0xDC80])
def test_controls_are_shown_as_escapes_that_json_reads(code: int) -> None:
    shown = visible(f"a{chr(code)}b")
    assert shown.isascii() and shown.isprintable()
    assert json.loads(f'"{shown}"') == f"a{chr(code)}b"
    assert printed(f"a{chr(code)}b") == shown


def test_text_of_all_scripts_stays() -> None:
    text = "zwölf עברית العربية हिन्दी 한국어 👩‍🔬 “…”"
    assert visible(text) == text


def test_line_breaks_are_kept_where_they_are_asked_for() -> None:
    assert visible("a\tb\nc\r", keep="\n\t") == "a\tb\nc\\r"
    assert visible("a\tb\nc\r") == "a\\tb\\nc\\r"


def test_errors_are_printed_as_they_are_in_one_line() -> None:
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(SystemExit), reported(console):
        raise ValueError("no [/such] file: \x1b[31m:smile:\r\nsee prefixkit[demo]")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown == "error: no [/such] file: \\u001b[31m:smile:\\r see prefixkit[demo]\n"
