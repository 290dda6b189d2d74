"""The code blocks of an answer in Markdown, as models write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A fence opens a block at any indentation, or, if it names its language, behind prose on its line.
_FENCE = re.compile(r"^(?P<indent>[ \t>]*)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<tag>[^`\n]*)$")
_INLINE = re.compile(r"(?<!`)(?P<fence>`{3,}+)(?P<tag>[A-Za-z+]+\d?)[ \t]*$")
_THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        tag: The name in its opening fence, in small letters: ``python``, ``cpp``, "", ...
        code: Its lines.
        closed: Whether a fence ends it.
    """

    tag: str
    code: str
    closed: bool = True


def without_thinking(text: str) -> str:
    """The answer without the thinking before it; "" if the thinking does not end.

    The tag that opens the thinking may be part of the prompt, and absent here.
    """
    parts, start, thinking = list[str](), 0, False
    for tag in _THOUGHT.finditer(text):
        if tag[1]:
            parts = parts if thinking else []  # text before the tag was thinking, too
            start, thinking = tag.end(), False
        elif not thinking:
            parts.append(text[start : tag.start()])
            thinking = True
    return "".join(parts) + ("" if thinking else text[start:])


def code_blocks(text: str) -> list[Block]:
    """The code blocks of an answer, in order; the last may lack its closing fence."""
    blocks, lines = [], text.split("\n")
    start = 0
    while start < len(lines):
        opened = _FENCE.match(lines[start]) or _INLINE.search(lines[start])
        if opened is None:
            start += 1
            continue
        block, start = _block(lines, start + 1, opened)
        blocks.append(block)
    return blocks


def open_block(text: str) -> str | None:
    """The code of the block inside which a text ends; None if it ends outside of blocks."""
    blocks = code_blocks(text)
    return blocks[-1].code if blocks and not blocks[-1].closed else None


def before_fence(text: str) -> str:
    """A text that begins inside a code block, up to the fence that ends the block."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.lstrip().startswith(("```", "~~~")):
            return "\n".join(lines[:number]) + ("\n" if number else "")
        if line.rstrip().endswith("```"):  # behind the last line of code
            return "\n".join([*lines[:number], line.rstrip().rstrip("`")])
    return text


def after_fence(text: str) -> str:
    """The text behind the first line that begins with a fence; "" without such a line."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.lstrip().startswith(("```", "~~~")):
            opens = line.strip().strip("`~").strip()  # by a tag
            return "\n".join(lines[number:] if opens else lines[number + 1 :])
    return ""


def _block(lines: list[str], start: int, opened: re.Match[str]) -> tuple[Block, int]:
    """The block whose first line is ``start``, and the number of the line after it."""
    groups = opened.groupdict()
    fence, indent = groups["fence"], len((groups.get("indent") or "").expandtabs(4))
    tag = (groups["tag"].split() or [""])[0].lower().strip("{}.")
    code, margin = list[str](), re.compile(f"^[ \\t>]{{0,{indent}}}")
    for number in range(start, len(lines)):
        line = lines[number]
        other = _FENCE.match(line)
        if other and other["fence"][0] == fence[0] and len(other["fence"]) >= len(fence):
            # A fence with a tag opens another block: the model forgot to close this one.
            return Block(tag, _text(code)), number if other["tag"].strip() else number + 1
        if fence[0] == "`" and line.rstrip().endswith(fence) and line.strip("` \t"):
            return Block(tag, _text([*code, line.rstrip()[: -len(fence)]])), number + 1
        code.append(margin.sub("", line, count=1))
    return Block(tag, _text(code), closed=False), len(lines)


def _text(lines: list[str]) -> str:
    text = "\n".join(lines)
    return text if not text or text.endswith("\n") else text + "\n"
