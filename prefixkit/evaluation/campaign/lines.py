"""Files of JSON that grow by whole lines, each a record, and what is said of lines that are none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")
# What comes of reading a value of JSON that is damaged: its fields are missing, or of other types, or too deep.
NO_RECORD = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def line_of(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def append(file: int, line: bytes, path: Path, kept: str) -> None:
    """Append a line to a file that no one else writes to.

    Raises:
        OSError: it could not be written whole; what was written of it has been taken back, and ``kept`` says what is
            left.
    """
    size, written = os.fstat(file).st_size, 0
    try:
        while written < len(line):
            written += os.write(file, line[written:])
    except OSError as error:
        os.ftruncate(file, size)
        raise OSError(f"{path}: {error.strerror}; {kept}") from error


def read_lines(path: Path, read: Callable[[Any], Made]) -> tuple[list[Made], list[int]]:
    """What ``read`` makes of each line, and the numbers of whole lines that it cannot read, from 1."""
    found, bad = list[Made](), list[int]()
    for number, line in enumerate(BytesIO(path.read_bytes()), start=1):
        try:
            found.append(read(json.loads(line)))
        except NO_RECORD:
            bad += [number] * line.endswith(b"\n")  # else torn
    return found, bad


def lines_said(numbers: Sequence[int], what: str) -> str:
    """That lines of a file are no ``what``; of very many, the first."""
    if len(numbers) == 1:
        return f"line {numbers[0]} is no {what}"
    more = f" and {len(numbers) - 9:,} more" * (len(numbers) > 9)
    return f"each of the lines {', '.join(map(str, numbers[:9]))}{more} is no {what}"


def some(said: Sequence[str], most: int = 20) -> str:
    """What is said, in one line; of very much, the first."""
    return "; ".join(said[:most]) + f"; and {len(said) - most:,} more" * (len(said) > most)
