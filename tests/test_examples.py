"""Each example runs, on its tiny model."""

import importlib
import sys
from pathlib import Path

import pytest

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
}


@pytest.mark.parametrize("name", SAYS)
def test_runs_and_reports(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(name).main(["--tiny"])
    assert SAYS[name] in capsys.readouterr().out


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"models", *SAYS}
