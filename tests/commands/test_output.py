"""A file that grows by whole lines."""

import errno
import json
import os

import pytest

from prefixkit.commands.output import LineFile


def test_each_record_is_on_disk_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "out.jsonl"
    with LineFile(path) as out:
        out.start()
        for number in range(3):
            out.write({"number": number, "text": "zwölf\n\u2028"})
            assert [json.loads(line)["number"] for line in path.read_bytes().splitlines()] == list(range(number + 1))
    assert out.lines == 3


def test_a_file_with_content_is_refused_unless_it_may_be_overwritten(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(FileExistsError, match="exists already; choose another --out, or give --overwrite"):
        LineFile(path)
    with LineFile(path, overwrite=True) as out:
        assert path.read_text() == "precious\n"  # a run that fails before its start loses nothing
        out.start()
        out.write({})
    assert path.read_text() == "{}\n"


def test_a_run_that_never_starts_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError), LineFile(tmp_path / "out.jsonl"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(OSError, match=r"cannot write to .*out\.jsonl: No such file or directory"):
        LineFile(tmp_path / "absent" / "out.jsonl")
    with pytest.raises(OSError, match=r"cannot write to .*: Is a directory"):
        LineFile(tmp_path)


class FullDisk:
    """A stream that takes ``room`` more bytes, a few at a time."""

    def __init__(self, stream, room):
        self.stream, self.room = stream, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.stream.write(data[: min(self.room, 5)])
        self.room -= taken
        return taken

    def flush(self):
        self.stream.flush()

    def close(self):
        self.stream.close()


def test_a_line_that_does_not_fit_is_taken_back(tmp_path):
    path = tmp_path / "out.jsonl"
    with LineFile(path) as out:
        out.start()
        out.write({"number": 1})
        out._stream = FullDisk(out._stream, room=8)
        with pytest.raises(OSError, match=r"No space left on device; the 1 lines before this are whole"):
            out.write({"number": 2})
    assert path.read_text() == '{"number": 1}\n'
