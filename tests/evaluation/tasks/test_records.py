"""Files of records: each form is read whole, and what is damaged is named."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from prefixkit.evaluation.tasks.records import read_records
from prefixkit.extras import MissingExtra
from prefixkit.testing.application.command_line import run

RECORDS = [{"id": 1, "prompt": "one"}, {"id": 2, "prompt": "zwölf"}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def fields(path):
    return [record.fields for record in read_records(path)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.txt", LINES),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES),  # a byte order mark, as editors on Windows write it
        ("a.jsonl", LINES.replace(b"\n", b"\r\n\r\n")),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.json", json.dumps(RECORDS).encode()),
        ("a.json", b"\xef\xbb\xbf" + json.dumps(RECORDS, indent=1).encode()),
        ("a.json.gz", gzip.compress(json.dumps(RECORDS).encode(), mtime=0)),
    ],
)
def test_the_same_records_in_every_form(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert fields(path) == RECORDS


def test_standard_input(folders):
    given = ["inspect", "--model", folders["weightless"], "--input", "-"]
    assert "2 prompts, 9 tokens" in run(*given, typed=LINES.decode()).stdout
    assert "standard input:3: not a JSON object" in run(*given, typed=LINES.decode() + "torn", code=2).stderr


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    assert fields(path) == RECORDS
    assert [record.where for record in read_records(path)] == [f"{path}: row 1", f"{path}: row 2"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(OSError, match="is no whole Parquet file"):
        fields(path)


def test_parquet_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match="run: pip install pyarrow"):
        fields(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b'{"id": 1}', "expected a list of objects, got dict"),
        ("a.json", b"[1]", "item 1: expected an object"),
        ("a.json", LINES, "a file with an object a line must be called .jsonl, perhaps torn"),
        ("a.json", b'["\xff"]', "not UTF-8"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "is no whole gzip file"),
        ("a.jsonl.gz", LINES, "is no whole gzip file"),
        ("a.jsonl", gzip.compress(LINES, mtime=0), ":1: not UTF-8"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises((ValueError, OSError)) as caught:
        fields(path)
    assert str(path) in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.json", "absent.jsonl.gz"])
def test_a_missing_file(name):
    with pytest.raises(OSError, match=f"cannot read the prompts in {name}: No such file"):
        fields(Path(name))
