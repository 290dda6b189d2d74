"""A campaign ends with the samples of an uninterrupted one, whatever stopped it, each once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from prefixkit.evaluation.campaign.folder import FolderBusy, Part, RunFolder
from prefixkit.evaluation.campaign.run import Goal
from prefixkit.testing.application.run_folders import folder_of, sample, sampler, set_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def whole(tmp_path):
    folder = folder_of(tmp_path / "whole")
    progress = sample(folder)
    assert (progress.there, progress.wanted, progress.samples) == (0, 32, 32)
    return set_of(folder)


def test_a_campaign_that_is_done_samples_nothing(tmp_path, whole):
    folder = RunFolder(tmp_path / "whole")
    progress = sample(folder)
    assert (progress.there, progress.wanted, progress.samples) == (32, 0, 0)
    assert set_of(folder) == whole


def test_more_samples_later_are_those_of_a_larger_campaign(tmp_path):
    little_by_little, at_once = folder_of(tmp_path / "a"), folder_of(tmp_path / "b")
    for n, first in ((3, 0), (9, 6), (12, 0)):
        sample(little_by_little, n, first=first)
    sample(at_once, 12)
    assert set_of(little_by_little) == set_of(at_once)


def test_equal_prompts_have_different_samples(whole):
    texts = {name: sorted(one[2:] for one in whole if one[0] == name) for name in ("p/0", "p/2")}
    assert texts["p/0"] != texts["p/2"]


@pytest.mark.parametrize("count", [4, 9])
@pytest.mark.parametrize("of", [2, 3])
def test_shards_are_the_whole_in_any_order_and_number(tmp_path, of, count):
    apart, at_once = folder_of(tmp_path / "a", count), folder_of(tmp_path / "b", count)
    for index in range(of - 1):
        sample(apart, 40, count, part=Part(index, of))
    sample(apart, 50, count, part=Part(1, 4))
    for index in reversed(range(of)):
        sample(apart, 50, count, part=Part(index, of))
    sample(at_once, 50, count)
    assert set_of(apart) == set_of(at_once)
    assert sample(apart, 50, count).wanted == 0


def test_an_error_in_the_midst_loses_nothing_that_had_finished(tmp_path, whole):
    folder, order = folder_of(tmp_path / "run"), np.random.default_rng(3)
    for fails_after in (0, 1, 5, 11):
        left = [fails_after]

        def fail(_, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyError("mine")

        before = len(set_of(folder))
        with pytest.raises(KeyError):
            sample(folder, run=lambda asked, give: sampler(asked, give, order), on_sample=fail)
        assert len(set_of(folder)) == before + fails_after + 1, "the one that failed was written"
    sample(folder)
    assert set_of(folder) == whole


def test_a_torn_line_is_sampled_again(tmp_path, whole):
    folder = folder_of(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        sample(folder, on_sample=lambda _: 1 / 0)
    (shard,) = folder.shards.glob("*.jsonl")
    line = shard.read_bytes()
    for torn in (line[:-1], line + line[:7], line + b"\0\0\0", line[:1]):
        shard.write_bytes(torn)
        shard.with_suffix(".json").unlink(missing_ok=True)
        other = folder_of(tmp_path / f"{len(torn)}")
        (other.shards / shard.name).write_bytes(torn)
        sample(other)
        assert set_of(other) == whole


def test_rounds_leave_solved_problems_alone(tmp_path):
    folder, asked = folder_of(tmp_path / "run"), []

    def solved(places, first):
        asked.append(len(set_of(folder)))
        return {1} if len(asked) == 1 else {1, 3}

    sample(folder, 12, round=5, solved=solved)
    assert asked == [20, 35]
    counts = [sum(one[0] == f"p/{i}" for one in set_of(folder)) for i in range(4)]
    assert counts == [12, 5, 12, 10]


def test_shards_too_many_for_whole_problems_cannot_leave_solved_ones_alone():
    with pytest.raises(ValueError, match=r"7 problems are too few: give at most 1 shards"):
        Goal(0, [4] * 7, Part(0, 2), round=2)
    assert Goal(0, [4] * 8, Part(0, 2), round=2).whole_prompts


def test_a_second_writer_is_refused_while_the_first_is_at_work(tmp_path, whole):
    folder, seen = folder_of(tmp_path / "run"), []

    def second(_):
        if not seen:
            for part in (Part(), Part(1, 2)):
                with pytest.raises(FolderBusy, match="another process is sampling"):
                    sample(RunFolder(folder.path), part=part)
            seen.append(1)

    sample(folder, on_sample=second)
    assert set_of(folder) == whole


def test_parts_of_one_division_work_side_by_side(tmp_path):
    folder, seen = folder_of(tmp_path / "run"), []

    def second(_):
        if not seen:
            seen.append(1)
            with pytest.raises(FolderBusy, match="the same part"):
                sample(RunFolder(folder.path), 40, part=Part(0, 2))
            sample(RunFolder(folder.path), 40, part=Part(1, 2))

    sample(folder, 40, part=Part(0, 2), on_sample=second)
    assert sample(folder, 40).wanted == 0


# A process that says when it has given some samples, and never gives the last ones: it waits to be killed.
PROCESS = """
import signal, sys, time
from pathlib import Path
from prefixkit.testing.application.run_folders import *
import prefixkit.evaluation.campaign.shards as shards
import numpy as np
path, seed, ready, most = Path(sys.argv[1]), *map(int, sys.argv[2:])
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background inherit one that is ignored
folder = folder_of(path, 4)
order = np.random.default_rng(seed)
shards.ShardWriter.__init__.__defaults__ = (16, 1 << 20)
given = 0

def run(asked, give):
    def give_slowly(one):
        global given
        if given == ready:
            print("ready", flush=True)
        while given == most:
            signal.pause()
        time.sleep(0.0002)
        give(one)
        given += 1
    return sampler(asked, give_slowly, order)

sample(folder, 200, run=run)
"""


@pytest.mark.parametrize("seed", range(2))
def test_a_campaign_that_is_killed_again_and_again(tmp_path, seed):
    """SIGKILL and SIGINT at any instant; shards close every 16 samples, so that closing is hit too."""
    rng = np.random.default_rng(seed)
    whole = folder_of(tmp_path / "whole")
    sample(whole, 200)
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "run")]
    for kill in range(5):
        # The five together give at most 750 of 800 samples, so that each is killed in the midst of its work.
        numbers = (kill, int(rng.integers(100)), 150)
        process = subprocess.Popen(
            [*command, *map(str, numbers)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(float(rng.uniform(0, 0.02)))  # whatever it does by then; nothing below depends on it
        process.send_signal(signal.SIGINT if kill == 2 else signal.SIGKILL)
        process.wait()
        process.stdout.close()
    folder = RunFolder(tmp_path / "run")
    assert 0 < len(set_of(folder)) < 800
    sample(folder, 200)
    assert set_of(folder) == set_of(whole)
