"""The examples in docs/reference/tasks.md are problems that can be read."""

import json
import re
from pathlib import Path

from prefixkit.evaluation.tasks.formats.detect import FORMATS, read_problem
from prefixkit.evaluation.tasks.formats.tests import read_tests
from prefixkit.evaluation.tasks.problem import KINDS
from prefixkit.evaluation.tasks.records import Record

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "tasks.md").read_text()


def objects():
    """The objects in code blocks that hold nothing else."""
    found, decoder = [], json.JSONDecoder()
    for tag, block in re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.M | re.S):
        while not tag and (block := block.strip()):
            value, end = decoder.raw_decode(block)
            found.append(value)
            block = block[end:]
    return found


def test_every_example_is_read():
    for fields in objects():
        read_problem(Record("docs/reference/tasks.md", "", fields))
    assert len(objects()) >= 10


def test_every_form_is_named_and_every_kind_of_tests():
    for form in FORMATS:
        assert f"`{form}`" in TEXT
    for kind, cls in KINDS.items():
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{kind}` |"))
        assert all(f"`{name}`" in row for name in cls.__dataclass_fields__), row
    assert read_tests(Record("here", "", {})) is None
