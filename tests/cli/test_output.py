"""Lines of JSON to a stream, each whole."""

import io
import json
from contextlib import redirect_stdout

import pytest

from prefixkit.cli.output import standard_output, write_line


class Narrow(io.RawIOBase):
    """Takes a few bytes at a time, and only so many."""

    def __init__(self, most):
        self.taken, self.most = b"", most

    def writable(self):
        return True

    def write(self, data):
        if len(self.taken) >= self.most:
            raise OSError(28, "No space left on device")
        self.taken += bytes(data[:3])
        return min(3, len(data))


def test_a_line_is_written_whole_however_little_the_stream_takes():
    stream, record = Narrow(1000), {"id": 1, "text": "zwölf\n\u2028"}
    write_line(stream, record)
    assert json.loads(stream.taken) == record
    assert stream.taken.count(b"\n") == 1 and stream.taken.endswith(b"\n")


def test_controls_are_escaped():
    stream = Narrow(1000)
    write_line(stream, {"text": "\x9b31m\u202e"})
    assert stream.taken == b'{"text": "\\u009b31m\\u202e"}\n'


def test_a_full_disk_is_said():
    with pytest.raises(OSError, match="No space left on device; the lines before this are whole"):
        write_line(Narrow(4), {"text": "long"})


def test_a_closed_standard_output_is_said():
    with redirect_stdout(None), pytest.raises(OSError, match="it is closed; give --run FOLDER"):
        standard_output()
