"""A JSONL file that grows by whole lines, and that one run at a time may write."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from prefixkit.cli.terminal import visible

if sys.platform != "win32":
    import fcntl

TRIES = 10  # to open a file that other runs create and remove meanwhile


class LineFile:
    """Records as lines of JSON, each on disk as soon as it is written; without a path they go to standard output.

    Opening checks that the path can be written, creates the file where there is none, and keeps other runs from it
    until it is closed (not on Windows, nor on file systems without locks).  What an overwritten file holds goes when
    the first record is there to replace it.  A file that was created and got no record is removed; one that was there
    before never is.

    Raises:
        OSError: The path cannot be written, holds what may not be overwritten, or another run is writing to it.
    """

    def __init__(self, path: Path | None, *, overwrite: bool = False) -> None:
        self.name = "standard output" if path is None else str(path)
        self.lines = 0
        self._path = path
        try:
            self._stream, self._created = (_standard_output(), False) if path is None else _open_locked(path)
        except OSError as error:
            raise OSError(f"cannot write to {self.name}: {error.strerror or error}") from error
        # The descriptor of a file that can be cut: no pipe or device, nor standard output, which is the shell's.
        self._file = None if path is None or not _regular(self._stream.fileno()) else self._stream.fileno()
        if self._file is not None and os.fstat(self._file).st_size and not overwrite:
            self._stream.close()
            raise FileExistsError(f"{path} exists already; choose another --out, or give --overwrite")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; the first one replaces what an overwritten file held.

        Raises:
            OSError: The line could not be written whole; what was written of it has been taken back.
        """
        # Controls that JSON leaves as they are (C1, reading direction) become escapes: a terminal may show the line.
        line = memoryview((visible(json.dumps(record, ensure_ascii=False)) + "\n").encode())
        written = 0
        try:
            if self._file is not None and not self.lines:
                os.ftruncate(self._file, 0)
            while written < len(line):
                written += self._stream.write(line[written:])
            self._stream.flush()
        except OSError as error:
            if written and self._file is not None:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(f"{self.name}: {error.strerror}; the {self.lines} lines before this are whole") from error
        self.lines += 1

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is None:
            return
        if self._created and self._file is not None and not os.fstat(self._file).st_size:
            with suppress(OSError):  # a run that failed early leaves nothing behind
                place = os.path.realpath(self._path)
                if _is_at(place, self._file):  # and what another put there stays; the file is still locked
                    os.unlink(place)
        self._stream.close()


def _standard_output() -> IO[bytes]:
    """Standard output without a buffer: where it cannot be written, nothing is left for the interpreter to flush."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "it is closed; give --out FILE")
    sys.stdout.flush()
    raw: IO[bytes] = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
    return raw


def _open_locked(path: Path) -> tuple[IO[bytes], bool]:
    """A stream that appends to ``path``, with no other run's beside it, and whether the file was created for it."""
    for _ in range(TRIES):
        flags, created = os.O_WRONLY | os.O_APPEND, False
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            try:  # where the links lead, as an exclusive creation follows none
                file, created = os.open(os.path.realpath(path), flags | os.O_CREAT | os.O_EXCL, 0o666), True
            except FileExistsError:
                continue  # another run was first
        stream = os.fdopen(file, "ab", buffering=0)
        try:
            _lock(file)
        except BaseException:
            stream.close()
            raise
        if _is_at(path, file):
            return stream, created
        stream.close()  # it was removed before the lock was had
    raise OSError(errno.EAGAIN, "other runs create and remove it; choose another --out")


def _lock(file: int) -> None:
    """Keep others from locking the file until it is closed; it is known by its inode, whatever its names."""
    if sys.platform == "win32" or not _regular(file):
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        busy = "another run is writing to it; choose another --out, or wait until that run is over"
        raise BlockingIOError(error.errno, busy) from error
    except OSError:
        pass  # a file system without locks


def _is_at(path: str | Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _regular(file: int) -> bool:
    return stat.S_ISREG(os.fstat(file).st_mode)
