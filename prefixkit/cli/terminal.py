"""The one place where text goes to a terminal: nothing in it is taken for markup or for a control sequence.

Prompts, ids, samples, paths and messages of errors come from others.  `line` makes rich's ``Text`` of them, so that
``[red]`` and ``:smile:`` stay what they are.  `visible` escapes the characters that would move the cursor, ring the
bell or reverse the reading direction.
"""

from __future__ import annotations

import io
import json
import re
import sys

from rich.console import Console
from rich.text import Text

# C0 and C1 controls, DEL, line separators, controls of the reading direction, and halves of surrogate pairs, which
# stand for bytes of a file's name that are not UTF-8 and cannot be encoded.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, keep: str = "") -> str:
    r"""``text`` with control characters escaped as in JSON (``\u001b``, ``\r``), except for those in ``keep``."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else json.dumps(found[0])[1:-1], text)


def line(*parts: str | tuple[str, str], keep: str = "") -> Text:
    """Text to print: each part as it is, or ``(part, style)``; control characters are escaped, except for ``keep``."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((visible(text, keep), style) for text, style in pairs))


def terminal(*, stderr: bool = False) -> Console:
    """Where a command prints: standard output or standard error; letters that its encoding lacks become escapes."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):  # None where it is closed
        stream.reconfigure(errors="backslashreplace")
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
