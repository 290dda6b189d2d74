"""A file that grows by whole lines."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixkit.cli.output import LineFile


def test_each_record_is_on_disk_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "out.jsonl"
    with LineFile(path) as out:
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
        assert path.read_text() == "precious\n"  # a run that fails before its first record loses nothing
        out.write({})
    assert path.read_text() == "{}\n"


def test_a_run_that_writes_nothing_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError), LineFile(tmp_path / "out.jsonl"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(OSError, match=r"cannot write to .*out\.jsonl: No such file or directory"):
        LineFile(tmp_path / "absent" / "out.jsonl")
    with pytest.raises(OSError, match=r"cannot write to .*: Is a directory"):
        LineFile(tmp_path)


def test_a_second_writer_is_refused_and_neither_removes_nor_empties_the_first_ones_file(tmp_path):
    path = tmp_path / "out.jsonl"
    (tmp_path / "link.jsonl").symlink_to(path)
    with LineFile(path) as first:
        for name in ("out.jsonl", "link.jsonl"):
            with pytest.raises(OSError, match=r"another run is writing to it; choose another --out"):
                LineFile(tmp_path / name, overwrite=True)
        first.write({"number": 1})
        with pytest.raises(OSError, match="another run"):
            LineFile(path, overwrite=True)
        first.write({"number": 2})
    assert path.read_text() == '{"number": 1}\n{"number": 2}\n'
    with LineFile(path, overwrite=True) as second:  # once the first is over
        second.write({"number": 3})
    assert path.read_text() == '{"number": 3}\n'


def test_a_run_that_fails_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "out.jsonl"
    path.touch()
    with pytest.raises(RuntimeError), LineFile(path):
        raise RuntimeError
    assert path.exists()


def test_a_run_that_fails_leaves_a_file_that_another_put_in_its_place(tmp_path):
    path = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError), LineFile(path):
        path.rename(tmp_path / "moved")
        path.touch()
        raise RuntimeError
    assert path.exists()


def test_a_link_to_a_place_without_a_file_is_followed(tmp_path):
    link, path = tmp_path / "link", tmp_path / "out.jsonl"
    link.symlink_to(path)
    with pytest.raises(RuntimeError), LineFile(link):
        assert path.exists()
        raise RuntimeError
    assert link.is_symlink() and not path.exists()
    with LineFile(link) as out:
        out.write({})
    assert path.read_text() == "{}\n"


def test_devices_may_have_many_writers():
    with LineFile(Path("/dev/null")) as first, LineFile(Path("/dev/null")) as second:
        first.write({})
        second.write({})


def test_a_reader_that_goes_away_is_an_error_and_no_noise_at_the_end():
    code = "import sys; from prefixkit.cli.output import LineFile; out = LineFile(None)\n"
    code += "sys.stdin.read()\ntry: out.write({})\nexcept OSError as error: sys.exit(str(error))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == "standard output: Broken pipe; the 0 lines before this are whole\n"
    assert process.wait() == 1


def test_a_closed_standard_output_names_the_remedy(tmp_path):
    code = "from prefixkit.cli.output import LineFile; LineFile(None)"
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "{code}" >&-'],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert "OSError: cannot write to standard output: it is closed; give --out FILE" in done.stderr


class FullDisk:
    """A stream that takes ``space`` more bytes, a few at a time."""

    def __init__(self, stream, space):
        self.stream, self.space = stream, space

    def write(self, data):
        if not self.space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.stream.write(data[: min(self.space, 5)])
        self.space -= taken
        return taken

    def flush(self):
        self.stream.flush()

    def close(self):
        self.stream.close()


def test_a_line_that_does_not_fit_is_taken_back(tmp_path):
    path = tmp_path / "out.jsonl"
    with LineFile(path) as out:
        out.write({"number": 1})
        out._stream = FullDisk(out._stream, space=8)
        with pytest.raises(OSError, match=r"No space left on device; the 1 lines before this are whole"):
            out.write({"number": 2})
    assert path.read_text() == '{"number": 1}\n'
