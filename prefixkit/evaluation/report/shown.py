r"""Untrusted texts, made visible: characters that hide, reorder or end text are escaped as in JSON (``\u202e``).

These are control characters, format characters without a width (among them those that set the reading direction),
separators of lines and paragraphs, halves of surrogate pairs, private and unassigned characters of the last planes, and
letters that are drawn blank.  The page's template writes every text through :func:`visible`, before it is escaped as
HTML.
"""

from __future__ import annotations

import json
import re

from markupsafe import Markup, escape

_HIDDEN = (
    "\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u070f\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\ud800-\udfff\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U0010ffff"
)
_UNSAFE = re.compile(f"[{_HIDDEN}]")
_HIDDEN_IN_CODE = _HIDDEN.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f")  # ends of lines and tabs are kept
_UNSAFE_IN_CODE = re.compile(f"[{_HIDDEN_IN_CODE}]+")
LONGEST = 300  # characters of an id, a detail or another text within a line


def visible(text: str, longest: int = LONGEST) -> str:
    """One line of text, without hidden characters, at most about ``longest`` characters long."""
    return _UNSAFE.sub(_escaped, cut(text, longest))


def marked(text: str, longest: int) -> str:
    """A program for the page's script: lines are kept, and each run of hidden characters becomes its escapes between
    U+0001 and U+0002, which mark nothing else, since they would be escaped themselves.

    Args:
        longest: The most characters to show; of a longer text, the beginning and the end are shown.
    """
    text = cut(text.replace("\r\n", "\n"), longest)
    return _UNSAFE_IN_CODE.sub(lambda found: f"\1{_escaped(found)}\2", text)


def code(text: str, longest: int) -> Markup:
    """:func:`marked` as HTML."""
    parts = re.split("[\1\2]", marked(text, longest))
    hidden = Markup('<b class="hidden">{}</b>')
    return Markup("").join(hidden.format(part) if odd % 2 else escape(part) for odd, part in enumerate(parts))


def cut(text: str, longest: int) -> str:
    """A text that is too long without its middle, which is replaced by the number of its characters."""
    if len(text) <= longest:
        return text
    head = max(1, longest * 2 // 3)
    tail = max(1, longest - head)
    return f"{text[:head]} […{len(text) - head - tail:,} characters…] {text[-tail:]}"


def cut_end(text: str, longest: int) -> str:
    """A text that is too long without its end."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
