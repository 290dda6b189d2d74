"""A prefix tree as a picture: tokens to the right, sequences downwards.

A rectangle is a node.  Its width is the number of its tokens, and its height the number of sequences that share it.  So
its area is the number of tokens that a plain batch computes and stores, and its width the number that prefixkit does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prefixkit.evaluation.report.axes import Scale, Tick, nice_range
from prefixkit.evaluation.report.figures import WIDE
from prefixkit.evaluation.report.numbers import plural
from prefixkit.evaluation.report.run_summary import Branch, Picture
from prefixkit.evaluation.report.shown import cut_end

_LETTER = 6.2  # pixels of a character, about
_LINE = 13.0
_THINNEST = 0.75  # pixels of a node that is drawn
_MOST_DRAWN = 1500


@dataclass(frozen=True)
class Block:
    """A node, in pixels."""

    x: float
    y: float
    width: float
    height: float
    level: int
    title: str
    label: str


@dataclass(frozen=True)
class Row:
    """A node in the outline: a line of text, and the nodes below it."""

    branch: Branch
    children: tuple[Row, ...]
    more: int  # children that are left out


@dataclass(frozen=True)
class Icicle:
    """The picture, in pixels."""

    title: str
    text: str
    width: float
    height: float
    bottom: float
    blocks: tuple[Block, ...]
    ticks: tuple[Tick, ...]
    left_out: int


def icicle(picture: Picture, width: int) -> Icicle:
    """The picture of a tree; nodes that are too thin to be seen are only counted."""
    placed = list(_placed(picture.roots))
    end = max((start + branch.tokens for branch, start, _, _ in placed), default=0) or 1
    sequences = sum(branch.shared_by for branch in picture.roots) or 1
    tallest = 420 if width == WIDE else 340
    body = min(tallest, max(56, 18 * sequences))
    x, y = Scale(0.0, end, 1.0, width - 1.0), Scale(0.0, sequences, 1.0, 1.0 + body)
    blocks: list[Block] = []
    for branch, start, above, level in placed:
        wide, high = x(start + branch.tokens) - x(start), y(above + branch.shared_by) - y(above)
        if min(wide, high) >= _THINNEST and len(blocks) < _MOST_DRAWN:
            title = f"{said(branch)}: {' '.join(branch.text[:300].split())}"
            blocks.append(Block(x(start), y(above), wide, high, level, title, _label(branch, wide, high)))
    _, _, every = nice_range(0.0, end, 6 if width == WIDE else 4)
    ticks = tuple(Tick(x(index * every), f"{index * every:,.0f}") for index in range(int(end / every + 1e-9) + 1))
    stored = sum(branch.tokens for branch, _, _, _ in placed)
    plain = sum(branch.tokens * branch.shared_by for branch, _, _, _ in placed)
    text = f"{plural(len(placed), 'node')}, {plural(stored, 'token')} stored once; unshared, {plain:,}"
    return Icicle(
        picture.title, text, float(width), body + 34.0, body + 1.0, tuple(blocks), ticks, len(placed) - len(blocks)
    )


def outline(branches: tuple[Branch, ...], most: int = 12) -> tuple[tuple[Row, ...], int]:
    """The tree as nested lines, the most shared nodes first, and the number of further nodes at this level."""
    order = sorted(branches, key=lambda branch: -branch.shared_by)
    return tuple(Row(branch, *outline(branch.children, most)) for branch in order[:most]), max(0, len(order) - most)


def said(branch: Branch) -> str:
    """A node's length, and the number of sequences that share it, in words."""
    shared = f", shared by {branch.shared_by:,}" if branch.shared_by > 1 else ""
    return f"{plural(branch.tokens, 'token')}{shared}"


def _placed(roots: tuple[Branch, ...]) -> Iterator[tuple[Branch, int, int, int]]:
    """Each node with the tokens before it, the sequences above it, and its level; parents first."""
    waiting = [(roots, 0, 0, 0)]
    while waiting:
        branches, start, above, level = waiting.pop()
        for branch in branches:
            yield branch, start, above, level
            waiting.append((branch.children, start + branch.tokens, above, level + 1))
            above += branch.shared_by


def _label(branch: Branch, width: float, height: float) -> str:
    room = int((width - 8) / _LETTER)
    if height < _LINE or room < 4:
        return ""
    tokens = f"{branch.tokens:,}"
    if branch.shared_by > 1:
        tokens += f" x {branch.shared_by:,}"
    words = " ".join(branch.text[:300].split())
    whole = f"{tokens}  {words}" if words else tokens
    if len(whole) <= room or len(tokens) + 4 < room:
        return cut_end(whole, room)
    return tokens if len(tokens) <= room else ""
