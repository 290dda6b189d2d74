"""Whatever one sample, problem, verdict or event of a run folder holds, the others go on, and it is named."""

from __future__ import annotations

import gzip
import json
import random
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from prefixkit.evaluation.campaign.folder import Asked, RunFolder, create
from prefixkit.evaluation.campaign.manifest import describe_prompts
from prefixkit.evaluation.campaign.shards import ShardWriter
from prefixkit.evaluation.tasks.problem import Calls, Problem, Streams
from prefixkit.testing.application.command_line import run
from prefixkit.testing.application.damage import Whole, outcomes
from prefixkit.testing.application.run_folders import manifest_of, prompts_of
from tests.evaluation.judge.judging import needs_sandbox

pytestmark = needs_sandbox()

ROOT = Path(__file__).parents[3]
GOOD = "def f(x):\n    return x + 1\n"


ONE = Calls("f", (((1,), 2),))


def folder_of(path, answers, every=(ONE,)):
    """A run folder with a problem for each tests, of which each has all answers, in a closed shard."""
    asked = [Asked(Problem(f"p/{i}", f"file:{i + 1}", (), "x", name="f", tests=own), "") for i, own in enumerate(every)]
    prompts = describe_prompts([f"p/{i}" for i in range(len(every))], prompts_of(len(every)), [{}] * len(every))
    folder = create(path, manifest_of(len(every), prompts=prompts), asked)
    writer = ShardWriter(folder.shards, "0of1")
    for place in range(len(every)):
        for index, text in enumerate(answers):
            writer.write(place, {"id": f"p/{place}", "index": index, "text": text, "tokens": [1]})
    writer.close()
    return folder


def one_line(result):
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_hostile_answers_problems_and_damage(tmp_path):
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)
    whole = Whole(tmp_path / "whole", chance, problems=8, samples=3)
    whole.check_damaged(tmp_path / "damaged", chance, most=4)
    for number in range(6):
        whole.check_manifest(tmp_path / f"manifest{number}", chance)


def test_answers_that_are_nested_deeply_stop_nothing(tmp_path):
    chain = "if f:\n    y = 0\n" + "".join(f"elif f == {i}:\n    y = {i}\n" for i in range(600))
    answers = [f"{GOOD}{chain}", f"{GOOD}y = {' + '.join(['1'] * 987)}\n", f"{GOOD}y = {'-' * 2000}1\n", GOOD]
    folder = folder_of(tmp_path / "run", answers)
    for command in (["evaluate"], ["report"], ["export", "--format", "programs"]):
        run(command[0], folder.path, *command[1:])
    assert list(outcomes(folder).values()) == ["passed"] * 4


def test_the_parsers_warnings_about_answers_are_not_shown(tmp_path):
    answer = f"{GOOD}table = {{}}\n\ndef g():\n    return '\\d' is 0if 1else 2\n\ntable[0] = g()\n"
    folder = folder_of(tmp_path / "run", [f"def f(x):\n    return table or x + 1\n\n{answer[answer.find('table') :]}"])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for command in (["evaluate"], ["report"], ["export", "--format", "evalplus"]):
            run(command[0], folder.path, *command[1:])
    assert not [one for one in found if one.filename.startswith("<")]


def test_problems_that_no_judge_can_use_are_named_and_the_others_judged(tmp_path):
    deep = 1
    for _ in range(300):
        deep = [deep]
    tests = [
        Streams((("1", "9" * 5000),), "numbers"),
        Calls("f", (((deep,), 2),)),
        Calls("f", ((([None] * 1_000_001,), 2),)),
        ONE,
    ]
    folder = folder_of(tmp_path / "run", [f"{GOOD}print(123)\n"], tests)
    said = one_line(run("evaluate", folder.path, "--quiet", code=1))
    assert "the tests of 2 of 4 problems do not run, the others are judged" in said
    assert "file:2: the arguments of case 0 cannot be passed on" in said and "file:3: the arguments" in said
    assert list(outcomes(folder).values()) == ["failed", None, None, "passed"]


def test_limits_of_an_old_run_that_nothing_can_keep_are_named(tmp_path):
    folder = folder_of(tmp_path / "run", [GOOD], [ONE, ONE])
    place = folder.path / "problems.jsonl.gz"
    lines = gzip.decompress(place.read_bytes()).splitlines(keepends=True)
    place.write_bytes(gzip.compress(lines[0].replace(b'"seconds": 10.0', b'"seconds": 1e9') + lines[1]))
    said = one_line(run("evaluate", folder.path, "--quiet", code=1))
    assert f"{place}: line 1 is no problem of this campaign" in said
    assert list(outcomes(RunFolder(folder.path)).values()) == [None, "passed"]


def test_a_closed_shard_whose_bytes_changed_at_equal_length_is_named(tmp_path):
    folder = folder_of(tmp_path / "run", [GOOD, "def f(x):\n    return 3\n"])
    (shard,) = folder.shards.glob("*.jsonl")
    shard.write_bytes(shard.read_bytes().replace(b"return 3", b"return 2"))
    for command in (["evaluate", "--quiet"], ["report", "--quiet"], ["export", "--format", "programs"]):
        said = run(command[0], folder.path, *command[1:], code=1).stderr
        assert f"{shard}: its content has changed since it was closed (SHA-256)" in said
    assert json.loads((folder.path / "report.json").read_text())["problems"][0]["counts"]


def test_a_shard_that_is_missing_is_named_and_a_copy_of_one_is_nothing(tmp_path):
    folder = folder_of(tmp_path / "run", [GOOD])
    (shard,) = folder.shards.glob("*.jsonl")
    shard.with_name(f"{shard.name}.bak").write_bytes(b"mine")
    run("report", folder.path, "--quiet")
    shard.unlink()
    assert f"{shard}: is missing; restore the file" in one_line(run("report", folder.path, "--quiet", code=1))


def test_a_damaged_line_of_a_shard_costs_that_sample_alone(tmp_path):
    folder = folder_of(tmp_path / "run", [GOOD] * 5)
    (shard,) = folder.shards.glob("*.jsonl")
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join([lines[0], b"\xff\n", lines[2].replace(b'"index": 2', b'"index": "2"'), *lines[3:]]))
    said = one_line(run("evaluate", folder.path, "--quiet", code=1))
    assert f"{shard}: each of the lines 2, 3 is no sample of this campaign; restore the file, or remove" in said
    assert outcomes(RunFolder(folder.path)) == {("p/0", index): "passed" for index in (0, 3, 4)}


def test_a_damaged_verdict_is_named_and_judged_again(tmp_path):
    folder = folder_of(tmp_path / "run", [GOOD, "def f(x):\n    return 3\n"])
    run("evaluate", folder.path, "--quiet")
    place = folder.path / "verdicts" / "all.jsonl"
    number = 1 + [b'"passed"' in one for one in place.read_bytes().splitlines()].index(True)
    place.write_bytes(place.read_bytes().replace(b'"passed"', b'"perhaps"'))
    said = one_line(run("report", folder.path, "--quiet"))
    assert f"{place}: line {number} is no verdict" in said
    run("evaluate", folder.path, "--quiet")
    assert list(outcomes(RunFolder(folder.path)).values()) == ["passed", "failed"]


def test_two_processes_do_not_judge_one_run(tmp_path):
    folder = folder_of(tmp_path / "run", [GOOD])
    with folder.judging():
        said = one_line(run("evaluate", folder.path, code=2))
    assert "another process is judging" in said and "wait for its end, or stop it" in said
    run("evaluate", folder.path, "--quiet")


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
from prefixkit.cli.app import main
sys.argv = ["prefixkit", *sys.argv[1:]]
main()
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="this system limits no file sizes")
def test_a_full_disk_leaves_no_file_in_the_way_of_the_next_export(tmp_path):
    folder = folder_of(tmp_path / "run", [f"def f(x):\n    return x + 1  # {'x' * 9000}\n"] * 4)
    command = ["export", folder.path, "--format", "evalplus", "--out", tmp_path / "out.jsonl"]
    done = subprocess.run([sys.executable, "-c", FULL, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "out.jsonl: File too large" in done.stderr, done.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]
    run(*command)
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 4


def test_a_folders_name_reaches_the_terminal_without_control_characters(tmp_path):
    folder = folder_of(tmp_path / "r\x1b[2J\x07\u202en", [GOOD])
    place = folder.path / "verdicts"
    place.mkdir()
    (place / "other.jsonl").write_bytes(b"{}\n")
    for command in (["evaluate"], ["report"], ["export", "--format", "programs", "--out", tmp_path / "out\x1b"]):
        done = run(command[0], folder.path, *command[1:])
        assert not {"\x1b", "\x07", "\u202e"} & set(done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("ranges", "what"),
    [
        ([[0, [[0, "1"]]]], "is not readable"),
        ([[0, [[0, 10**12]]]], "is not readable"),
        ([[7, [[0, 1]]]], "has the ranges of other samples"),
        ([[0, [[1, 2]]]], "has the ranges of other samples"),
    ],
)
def test_ranges_of_a_closed_shard_are_checked(tmp_path, ranges, what):
    folder = folder_of(tmp_path / "run", [GOOD] * 2)
    (index,) = folder.shards.glob("*.json")
    index.write_text(json.dumps(json.loads(index.read_text()) | {"ranges": ranges}))
    said = one_line(run("report", folder.path, "--quiet", code=1))
    assert f"0of1-00000.json {what}" in said


def test_events_of_wrong_types_are_named_and_passed_over(tmp_path):
    folder = folder_of(tmp_path / "run", [GOOD])
    folder.note(event="began", at=1e9, part="0of1")
    with (folder.path / "history.jsonl").open("ab") as file:
        for change in ({"at": "soon"}, {"at": 1e300}, {"samples": [1]}, {"report": {"steps": "x"}}, {"tokens": -1}):
            file.write(json.dumps({"event": "ended", "at": 1e9 + 20, "part": "0of1"} | change).encode() + b"\n")
        file.write(b"5\n[1]\n")
    folder.note(event="ended", at=1e9 + 15, part="0of1", samples=1, tokens=30, report={"unpipelined": 5})
    said = one_line(run("report", folder.path, "--quiet"))
    assert "history.jsonl: each of the lines 2, 3, 4, 5, 6, 7, 8 is no event of a run" in said
    assert json.loads((folder.path / "report.json").read_text())["seconds"] == 15


def test_one_run_is_not_reported_twice(tmp_path):
    folder = folder_of(tmp_path / "run", [GOOD])
    said = one_line(run("report", folder.path, tmp_path / "run" / ".." / "run", code=2))
    assert "is given twice" in said
    assert not (folder.path / "report.html").exists()
