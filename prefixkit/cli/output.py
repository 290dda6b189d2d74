"""Samples as lines of JSON to standard output, each whole."""

from __future__ import annotations

import json
import sys
from typing import IO, Any

from prefixkit.cli.terminal import visible


def standard_output() -> IO[bytes]:
    """Standard output without a buffer, which leaves the interpreter nothing to flush; OSError if it is closed."""
    if sys.stdout is None:
        raise OSError("cannot write to standard output: it is closed; give --run FOLDER")
    sys.stdout.flush()
    raw: IO[bytes] = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
    return raw


def write_line(
    stream: IO[bytes],
    record: dict[str, Any],
    name: str = "standard output",
    kept: str = "the lines before this are whole",
) -> None:
    """Write one record; if that fails, the OSError names the stream (``name``) and what is left (``kept``)."""
    # Controls that JSON leaves as they are (C1, reading direction) become escapes: a terminal may show the line.
    line = memoryview((visible(json.dumps(record, ensure_ascii=False)) + "\n").encode())
    written = 0
    try:
        while written < len(line):
            written += stream.write(line[written:])
        stream.flush()
    except OSError as error:
        raise OSError(f"{name}: {error.strerror}; {kept}") from error
