"""Each example runs, on its tiny model."""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["parallel_sampling", "beam_search", "few_shot_batch", "session", "constrained"])
def test_runs_and_reports(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(name).main(["--tiny"])
    assert "tokens computed" in capsys.readouterr().out


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "models",
        "parallel_sampling",
        "beam_search",
        "few_shot_batch",
        "session",
        "constrained",
    }
