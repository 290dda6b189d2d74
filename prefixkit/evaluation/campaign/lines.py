"""Files of JSON that grow by whole lines, each a record, and messages about lines that are not records."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")
# Exceptions from reading a damaged JSON value: fields are missing, have other types, or are nested too deeply.
NO_RECORD = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def line_of(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def append(file: int, line: bytes, path: Path, kept: str) -> None:
    """Append a line to a file that no one else writes to.

    Raises:
        OSError: the line could not be written whole; the file is truncated to its size before, and ``kept`` says what
            it still holds.
    """
    size, written = os.fstat(file).st_size, 0
    try:
        while written < len(line):
            written += os.write(file, line[written:])
    except OSError as error:
        os.ftruncate(file, size)
        raise OSError(f"{path}: {error.strerror}; {kept}") from error


def read_lines(path: Path, read: Callable[[Any], Made]) -> tuple[list[Made], list[int]]:
    """The results of ``read`` for each line, and the numbers, from 1, of whole lines that it cannot read."""
    found, bad = list[Made](), list[int]()
    for number, line in enumerate(BytesIO(path.read_bytes()), start=1):
        try:
            found.append(read(json.loads(line)))
        except NO_RECORD:
            bad += [number] * line.endswith(b"\n")  # else torn
    return found, bad


def lines_said(numbers: Sequence[int], what: str) -> str:
    """A message that lines of a file are no ``what``; of many lines it names the first nine."""
    if len(numbers) == 1:
        return f"line {numbers[0]} is no {what}"
    more = f" and {len(numbers) - 9:,} more" * (len(numbers) > 9)
    return f"each of the lines {', '.join(map(str, numbers[:9]))}{more} is no {what}"


def some(said: Sequence[str], most: int = 20) -> str:
    """Messages in one line; of more than ``most``, the first."""
    return "; ".join(said[:most]) + f"; and {len(said) - most:,} more" * (len(said) > most)
