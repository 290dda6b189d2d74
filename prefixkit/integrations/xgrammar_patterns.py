"""Finds what xgrammar (0.2.8) reads or writes otherwise in regular expressions than it should."""

from __future__ import annotations

import re
from collections.abc import Iterator

# One escape, the start of a class or of a look-around, or one other character.
_PIECE = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]{1,6}\}|c[A-Za-z]|.)|\[\^?|\(\?<?[=!]|.", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "e": "\x1b", "b": "\b"}
_KNOWN = {*_ESCAPES, *"dDwWsSBpPkcxu"}  # letters after a backslash that are not read as the letter; some are refused


def misread(pattern: str) -> str | None:
    """The first part of the regular expression ``pattern`` that xgrammar reads as a letter, such as ``\\A``."""
    found = (piece for piece, _ in _pieces(pattern) if len(piece) == 2 and piece[0] == "\\")
    return next(
        (piece for piece in found if piece[1].isascii() and piece[1].isalpha() and piece[1] not in _KNOWN), None
    )


def ignored(pattern: str) -> str | None:
    """The start of the first look-around in ``pattern``, which xgrammar ignores in JSON schemas."""
    return next((piece for piece, inside in _pieces(pattern) if not inside and piece.startswith("(?")), None)


def unescaped(pattern: str) -> str | None:
    """The first part of ``pattern`` that xgrammar lets match characters as they are that JSON only holds escaped.

    Outside classes these are quotes, backslashes and control characters.  From a class xgrammar takes these characters
    away, unless no others are left.
    """
    members: list[str] = []
    for piece, inside in _pieces(pattern):
        if not inside:
            if piece != r"\b" and _held_escaped(_character(piece)):
                return piece
            members = []
        elif piece == "]":
            if members and members[0] == "[" and _all_held_escaped([_character(one) for one in members[1:]]):
                return "".join(members) + "]"
        else:
            members.append(piece)
    return None


def _pieces(pattern: str) -> Iterator[tuple[str, bool]]:
    """The parts of a regular expression, and whether each is of a class, whose brackets are parts of it."""
    inside = False
    for piece in _PIECE.findall(pattern):
        if inside and len(piece) > 1 and piece[0] != "\\":  # in a class these are single characters
            yield from ((one, True) for one in piece)
            continue
        inside = inside or piece[0] == "["
        yield piece, inside
        inside = inside and piece != "]"


def _character(piece: str) -> str | None:
    """The character that a part stands for; None if it stands for several."""
    if piece[0] != "\\" or len(piece) == 1:
        return piece if len(piece) == 1 else None
    letter, rest = piece[1], piece[2:].strip("{}")
    if rest:
        return chr(ord(rest) % 32) if letter == "c" else chr(min(int(rest, 16), 0x10FFFF))
    return _ESCAPES.get(letter, None if letter.isalnum() else letter)


def _held_escaped(character: str | None) -> bool:
    return character is not None and (character < " " or character in '"\\')


def _all_held_escaped(members: list[str | None]) -> bool:
    """Whether a class has members, single ones or ranges, and all of them are held escaped by JSON."""
    position = 0
    while position < len(members):
        low, high = members[position], members[position]
        if members[position + 1 : position + 2] == ["-"] and position + 2 < len(members):
            high = members[position + 2]
            position += 2
        if not (_held_escaped(low) and _held_escaped(high) and (low == high or str(high) < " ")):
            return False
        position += 1
    return bool(members)
