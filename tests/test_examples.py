"""Each example runs, on its tiny model."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prefixkit.evaluation.campaign.folder import RunFolder

EXAMPLES = Path(__file__).parents[1] / "examples"


SAYS = {
    "parallel_sampling": "tokens computed",
    "beam_search": "tokens computed",
    "few_shot_batch": "tokens computed",
    "session": "tokens computed",
    "constrained": "tokens computed",
    "patch_generate": "the same tokens: True",
    "beams_unchanged": "the same tokens: True",
    "pipeline": "What is a harbour?",
    "lora": "no adapter: KV of",
    "own_model": "equal to dense attention: True; 12 steps took 2 plans",
    "best_of_n": "tokens computed",
    "self_consistency": "of 24 chains",
    "diverse_beams": "group 2",
    "scored_beams": "beam search by log-probability alone",
    "tree_of_thoughts": "-> depth 4",
    "verifier_search": "the last level's values took",
}


@pytest.mark.parametrize("name", SAYS)
def test_runs_and_reports(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(name).main(["--tiny"])
    assert SAYS[name] in capsys.readouterr().out


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"models", "ray_campaign", *SAYS}


def test_a_campaign_on_two_ray_actors_one_of_which_is_killed(folders, prompts, tmp_path, monkeypatch):
    """Ray starts another in its place, which samples what the first has not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(EXAMPLES.parent), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    for unused in ("RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart"):  # processes that wait for tasks
        monkeypatch.setenv(unused, "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else other tests take the cores from them
    own = ["--model", str(folders["plain"]), "--input", str(prompts), "-n", "24", "--max-new-tokens", "24"]
    own += ["--in-flight", "2", "--run", str(tmp_path / "run")]
    command = [sys.executable, str(EXAMPLES / "ray_campaign.py"), "--replicas", "2", "--gpus", "0", "--", *own]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        said, begun, shard = [], None, tmp_path / "run/samples/0of2-00000.jsonl"
        for line in driver.stdout:
            said.append(line)
            if begun is None and (begun := re.search(r"pid=(\d+).*samples part 0/2", line)):
                wait_until(lambda: shard.exists() and shard.stat().st_size, driver)
                os.kill(int(begun[1]), signal.SIGKILL)
    assert driver.returncode == 0, "".join(said)
    assert {line for line in said if line.startswith("part")} == {"part 0/2 is done\n", "part 1/2 is done\n"}
    folder = RunFolder(tmp_path / "run")
    samples = [(sample["id"], sample["index"]) for sample in folder.samples()]
    assert len(samples) == len({*samples}) == 3 * 24
    assert [event["part"] for event in folder.history() if event["event"] == "began"].count("0of2") == 2


def wait_until(true, process):
    while not true() and process.poll() is None:
        time.sleep(0.02)
