"""A JSONL file that grows by whole lines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any


class LineFile:
    """Records as lines of JSON, each on disk as soon as it is written; without a path they go to standard output.

    Opening checks that the path can be written and creates the file; what a file holds goes only when `start` is called.
    """

    def __init__(self, path: Path | None, *, overwrite: bool = False) -> None:
        self.name = "standard output" if path is None else str(path)
        self.lines = 0
        self._path, self._created = path, False
        self._stream: IO[bytes] = sys.stdout.buffer if path is None else self._open(path, overwrite)

    def _open(self, path: Path, overwrite: bool) -> IO[bytes]:
        try:
            self._created = not path.exists()
            if path.is_file() and path.stat().st_size and not overwrite:
                raise FileExistsError(f"{path} exists already; choose another --out, or give --overwrite")
            return path.open("ab", buffering=0)
        except FileExistsError:
            raise
        except OSError as error:
            raise OSError(f"cannot write to {path}: {error.strerror}") from error

    def start(self) -> None:
        """Drop what an overwritten file held: everything before the first record is ready."""
        if self._path is not None and self._path.is_file():
            os.truncate(self._path, 0)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record.

        Raises:
            OSError: The line could not be written whole; what was written of it has been taken back.
        """
        line = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode())
        written = 0
        try:
            while written < len(line):
                written += self._stream.write(line[written:])
            self._stream.flush()
        except OSError as error:
            self._take_back(written)
            raise OSError(f"{self.name}: {error.strerror}; the {self.lines} lines before this are whole") from error
        self.lines += 1

    def _take_back(self, written: int) -> None:
        if written and self._path is not None and self._path.is_file():
            os.truncate(self._path, self._path.stat().st_size - written)

    def __enter__(self) -> LineFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is None:
            return
        self._stream.close()
        if self._created and not self.lines:  # a run that failed early leaves nothing behind
            self._path.unlink(missing_ok=True)
