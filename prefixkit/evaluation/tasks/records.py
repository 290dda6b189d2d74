"""Records of a file: lines of JSON, a list in JSON, or rows of Parquet, each with its place for error messages."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from prefixkit.extras import MissingExtra

STANDARD_INPUT = Path("-")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """An object of a file.

    Attributes:
        where: File and line, for error messages.
        place: The line alone, for messages that already name the file.
        fields: The object's fields.
    """

    where: str
    place: str
    fields: Mapping[str, Any]


def read_records(path: Path) -> Generator[Record]:
    """The objects of a file, one by one.

    The end of its name decides the format: ``.json`` is a list, ``.parquet`` a table, all others have an object a line;
    ``.gz`` may follow; ``-`` is standard input.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a JSON object in UTF-8; the message has file and line.
        MissingExtra: a Parquet file needs the package ``pyarrow``.
    """
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind == ".parquet":
        return _rows(path)
    return _items(path) if kind == ".json" else _lines(path)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """The file's bytes, unpacked; an error while they are read becomes one that names the file."""
    try:
        if path == STANDARD_INPUT:
            yield sys.stdin.buffer
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise OSError(f"{path} is no whole gzip file ({error}); copy or download it again") from error
    except OSError as error:
        raise OSError(f"cannot read the prompts in {path}: {error.strerror or error}") from error


def _lines(path: Path) -> Generator[Record]:
    name = "standard input" if path == STANDARD_INPUT else str(path)
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(_BOM) if number == 1 else line
            if content.strip():
                where = f"{name}:{number}"
                yield Record(where, f"line {number}", _object(_decoded(content.rstrip(b"\n"), where), where))


def _items(path: Path) -> Generator[Record]:
    with _opened(path) as file:
        content = file.read().removeprefix(_BOM)
    found = _decoded(content, f"{path}:1", "a JSON list; a file with an object a line must be called .jsonl")
    if not isinstance(found, list):
        raise ValueError(f"{path}: expected a list of objects, got {type(found).__name__}; write [{{...}}, ...]")
    for number, item in enumerate(found, start=1):
        where = f"{path}: item {number}"
        yield Record(where, f"item {number}", _object(item, where))


def _rows(path: Path) -> Generator[Record]:
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingExtra(f"{path}: Parquet files need the package pyarrow; run: pip install pyarrow")
    import pyarrow
    from pyarrow import parquet

    try:
        with _opened(path) as content, parquet.ParquetFile(content) as file:
            rows = (row for batch in file.iter_batches(batch_size=64) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield Record(f"{path}: row {number}", f"row {number}", row)
    except pyarrow.ArrowInvalid as error:
        raise OSError(f"{path} is no whole Parquet file ({error}); copy or download it again") from error


def decode_json(text: str, where: str, what: str = "a JSON object") -> Any:
    """The value of JSON ``text``; ValueError if it is not ``what``, nested too deeply, or has an integer too long."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"{where}: not {what}, perhaps torn ({error.msg} at {line}column {error.colno})") from error
    except (RecursionError, ValueError) as error:  # deeply nested brackets, or an integer of thousands of digits
        raise ValueError(f"{where}: nested too deeply, or a number too long, for a prompt ({error})") from error


def _decoded(content: bytes, where: str, what: str = "a JSON object") -> Any:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        said = f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file in UTF-8"
        raise ValueError(said) from error
    return decode_json(text, where, what)


def _object(found: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        wanted = 'an object with "id" and "prompt", or with the fields of a data set'
        raise ValueError(f"{where}: expected {wanted}, got {type(found).__name__}")
    return found
