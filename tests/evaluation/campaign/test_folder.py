"""A run folder is what its manifest says, and refuses what would make it something else."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefixkit.evaluation.campaign.folder import Asked, NotARun, RunFolder, create
from prefixkit.evaluation.campaign.manifest import FORMAT, Manifest, OtherCampaign
from prefixkit.evaluation.campaign.shards import DamagedShard, ShardWriter, ranges_of
from prefixkit.evaluation.tasks.problem import Calls, Checks, Problem, Streams
from prefixkit.testing.application.run_folders import folder_of, manifest_of, problems_of, sample, set_of

ROOT = Path(__file__).parents[3]


def test_a_manifest_is_read_as_it_was_written():
    manifest = manifest_of(3, params={"stop": ["\n```"], "temperature": 0.6, "seed": 2**63})
    assert Manifest.from_json(manifest.to_json(), "here") == manifest


def test_equal_prompts_are_numbered_over_the_whole_input():
    assert [prompt.occurrence for prompt in manifest_of(4).prompts] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fingerprint": "g"}, "weights or tokens that end samples, of fingerprint 'f' there, and now 'g'"),
        ({"dtype": "bfloat16"}, "dtype 'float32' there, and now 'bfloat16'"),
        ({"params": {"temperature": 0.6, "seed": 7}}, "temperature 1.0 there, and now temperature 0.6"),
        ({"chat": True}, "chat False there, and now True"),
        ({"logprobs": False}, "logprobs True there, and now False"),
        ({"prompts": manifest_of(3).prompts}, "4 prompts there, and now 3"),
        ({"prompts": manifest_of(4).prompts[::-1]}, "prompt 0 is 'p/0' there, and now 'p/3'"),
    ],
)
def test_another_campaign_is_refused_and_the_difference_named(tmp_path, changes, says):
    sample(folder_of(tmp_path / "run"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OtherCampaign, match=r"holds samples of another campaign: .*choose another folder") as error:
        folder_of(tmp_path / "run", **changes)
    assert says in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_other_versions_go_on_and_are_said(tmp_path, caplog):
    folder_of(tmp_path / "run")
    folder_of(tmp_path / "run", versions={"prefixkit": "1"})
    assert "was begun with prefixkit 0, and goes on with 1" in caplog.text


def test_problems_come_back_with_their_tests(tmp_path):
    tests = [Checks("assert f(1)", ("f",), "import math"), Calls("f", (((1, 2), [3]),), 0.1), Streams((("1", "2"),))]
    asked = [
        Asked(Problem(one.id, one.where, ({"role": "user", "content": "ü\ud800"},), "x", tests=own), "def f():")
        for one, own in zip(problems_of(3), tests, strict=True)
    ]
    folder = create(tmp_path / "run", manifest_of(3), asked)
    assert folder.asked() == asked


def test_new_tests_take_the_place_of_old_ones(tmp_path, caplog):
    caplog.set_level("INFO")
    folder_of(tmp_path / "run", 1)
    asked = [Asked(Problem("p/0", "", (), "prompt 0", tests=Checks("assert f(1)", ("f",))), "")]
    assert create(tmp_path / "run", manifest_of(1), asked).asked() == asked
    assert "the tests of its problems have changed" in caplog.text


@pytest.mark.parametrize("what", ["file", "other files", "nothing", "other format", "no manifest"])
def test_what_is_no_run_folder(tmp_path, what):
    place = tmp_path / "run"
    if what == "file":
        place.write_text("mine")
    elif what == "other files":
        place.mkdir()
        (place / "thesis.tex").write_text("mine")
    elif what != "nothing":
        folder_of(place)
        text = "{}" if what == "no manifest" else json.dumps({"format": FORMAT + 1})
        (place / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"is no run folder|is no manifest|has format 2, and this prefixkit reads 1"):
        RunFolder(place)
    if what in ("file", "other files"):
        with pytest.raises(NotARun, match="choose a new or empty folder"):
            folder_of(place)


def test_what_was_left_of_making_a_folder_is_no_obstacle(tmp_path):
    (tmp_path / "run" / "samples").mkdir(parents=True)
    (tmp_path / "run" / ".making-xyz").write_text("torn")
    assert sample(folder_of(tmp_path / "run")).samples == 32


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "index"])
def test_a_closed_shard_that_has_changed_is_refused(tmp_path, damage):
    folder = folder_of(tmp_path / "run")
    sample(folder)
    (shard,) = folder.shards.glob("*.jsonl")
    content = shard.read_bytes()
    if damage == "gone":
        shard.unlink()
    elif damage == "index":
        shard.with_suffix(".json").write_bytes(b"{")
    else:
        shard.write_bytes(content[:-9] if damage == "cut" else content.replace(b"p/1", b"p/0"))
    with pytest.raises(DamagedShard, match=r"restore the file, or remove 0of1-00000.jsonl and 0of1-00000.json"):
        sample(folder)
    shard.unlink(missing_ok=True)
    shard.with_suffix(".json").unlink()
    sample(folder)
    assert len(set_of(folder)) == 32


def test_an_open_shard_with_a_foreign_line_is_refused(tmp_path):
    folder = folder_of(tmp_path / "run")
    shard = folder.shards / "0of1-00000.jsonl"
    shard.write_bytes(b'{"id": "p/9", "index": 0, "tokens": []}\n{"id": "p/0", "index": 0, "tokens": []}\n')
    with pytest.raises(DamagedShard, match="line 1 is no sample of this campaign"):
        sample(folder)


def test_runs_of_indices():
    assert ranges_of([(1, 3), (0, 5), (1, 2), (1, 0), (0, 6)]) == {0: [[5, 6]], 1: [[0, 0], [2, 3]]}


def test_shards_are_closed_as_they_fill(tmp_path):
    folder = folder_of(tmp_path / "run")
    writer = ShardWriter(folder.shards, "0of1", lines=3)
    for index in range(7):
        writer.write(0, {"id": "p/0", "index": index, "tokens": [1]})
    assert [len(list(folder.shards.glob(f"*.{kind}"))) for kind in ("jsonl", "json")] == [3, 2]
    writer.close()
    writer.close()
    assert bytes(folder.have()[0]) == b"\1" * 7


FULL = """
import resource, sys
from pathlib import Path
from prefixkit.testing.application.run_folders import folder_of, sample
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
try:
    sample(folder_of(Path(sys.argv[1])), 40)
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="this system limits no file sizes")
def test_a_line_that_does_not_fit_is_taken_back_whole(tmp_path):
    """As on a full disk: the file may not grow in the midst of a line."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert "0of1-00000.jsonl: File too large; the samples before are whole" in done.stdout, done.stderr
    folder = RunFolder(tmp_path / "run")
    (shard,) = folder.shards.glob("*.jsonl")
    assert shard.read_bytes().endswith(b"}\n")
    sample(folder, 40)
    whole = folder_of(tmp_path / "whole")
    sample(whole, 40)
    assert set_of(folder) == set_of(whole)


def create_with(path, seed, together, told):
    """Create a run folder at the same time as others; tell the seed and the manifest's, or what was refused."""
    together.wait()
    try:
        found = folder_of(path, params={"seed": seed})
    except ValueError as error:
        told.put(type(error).__name__)
    else:
        told.put((seed, found.manifest.params["seed"]))


def test_of_two_processes_that_create_a_folder_with_other_parameters_one_is_refused(tmp_path):
    forked = multiprocessing.get_context("fork")
    for turn in range(5):
        together, told = forked.Barrier(2), forked.Queue()
        both = [forked.Process(target=create_with, args=(tmp_path / str(turn), s, together, told)) for s in (1, 2)]
        for process in both:
            process.start()
        found = [told.get(timeout=60) for _ in both]
        assert "OtherCampaign" in found
        ((seed, there),) = [one for one in found if one != "OtherCampaign"]
        assert seed == there
        for process in both:
            process.join()


def test_a_copy_of_the_manifest_alone_goes_on(tmp_path, caplog):
    folder_of(tmp_path / "run")
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "run" / "manifest.json", tmp_path / "copy")
    sample(folder_of(tmp_path / "copy"))
    assert "have changed" not in caplog.text
