"""Each example runs, on its tiny model."""

import importlib
import os
import subprocess
import sys
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


def test_parts_of_a_campaign_on_ray(folders, prompts, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(EXAMPLES.parent), os.environ.get("PYTHONPATH", ""))))
    own = ["--model", str(folders["plain"]), "--input", str(prompts), "-n", "20", "--max-new-tokens", "2"]
    arguments = ["--parts", "2", "--gpus", "0", "--", *own, "--run", str(tmp_path / "run")]
    command = [sys.executable, str(EXAMPLES / "ray_campaign.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "part 1/2 is done" in done.stdout, done.stderr
    assert len(list(RunFolder(tmp_path / "run").samples())) == 60
