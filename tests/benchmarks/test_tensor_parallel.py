"""The benchmark of split models, in one process: what it measures, and what it says beside an earlier run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.closeness import Texts, closeness, equal_until
from benchmarks.tensor_parallel import beside, main

TEXTS = 50


def test_a_run_says_what_it_is_beside_another(tmp_path):
    out = tmp_path / "one.json"
    sizes = "--rows", "3", "--prompt", "40", "--new", "36", "--steps", "6", "--texts", "9"
    main(["--shape", "tiny", *sizes, "--out", str(out)])
    found = json.loads(out.read_text())
    (preempted,) = found["preempted"]
    assert preempted["preempted_swapped"] + preempted["preempted_recomputed"] > 0
    (equal,), (step,), (generated,), (texts,) = (found[key] for key in ("equal", "steps", "generate", "texts"))
    assert equal["equal"] and "of_one_process" not in step
    half = {**step, "step_ms": step["step_ms"] / 2}
    assert beside(half, "steps", ("rows", "prompt", "new"), found) == {"of_one_process": 0.5}
    assert beside(generated, "generate", ("rows",), found) == {"of_one_process": 1.0}
    assert beside({**step, "rows": 4}, "steps", ("rows",), found) == {}
    assert beside(texts, "texts", (), found) == {}
    assert texts["texts"] == 9 and 0 < texts["batches"]["difference"] < 1e-5
    assert texts["batches"]["equal_share"] > 0.9


@pytest.fixture
def one():
    """Texts of one process in three shapes, which differ by 1 on average, and after 4, 2 and 2 tokens."""
    logprobs = np.random.default_rng(0).standard_normal((1, TEXTS, 7)) + np.array([-1.0, 0.0, 0.5])[:, None, None]
    greedy = np.zeros((3, TEXTS, 6), np.int64)
    greedy[1, :, 4] = greedy[2, :, 2] = 1
    return Texts(logprobs, greedy)


def test_batches_of_one_process_are_compared_in_pairs(one):
    summary = {"difference": 1.0, "equal_share": round((4 + 2 + 2) / 3 / 6, 3), "median_equal": 2.0}
    assert closeness(one) == {"texts": TEXTS, "batches": summary}


def test_processes_are_compared_in_equal_shapes(one, tmp_path):
    """Each text is a half as far as batches are, or twice as far."""
    far = np.where(np.arange(TEXTS) % 2, 0.5, 2.0)
    greedy = one.greedy.copy()
    greedy[:, :, 5] = -1
    Texts(one.logprobs + far[:, None], greedy).save(tmp_path / "two.npz")
    row = closeness(one, Texts.load(tmp_path / "two.npz"))
    assert row["processes"] == {"difference": 1.25, "equal_share": round(5 / 6, 3), "median_equal": 5.0}
    (low, high), error = row["ratio_interval"], 1.96 * 0.75 / TEXTS**0.5
    assert row["ratio"] == 1.25
    assert low == pytest.approx(1.25 - error, abs=0.03) and high == pytest.approx(1.25 + error, abs=0.03)
    assert row["tokens_ratio"] == round(5 / (8 / 3), 3) and row["tokens_ratio_interval"] == [row["tokens_ratio"]] * 2


def test_tokens_are_equal_until_the_first_that_differs():
    one, other = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3]]), np.array([[1, 2, 3], [0, 2, 3], [1, 0, 3]])
    assert equal_until(one, other).tolist() == [3, 0, 1]


@pytest.mark.parametrize("differ", [0, 3])
def test_there_is_no_ratio_where_batches_are_equal_in_most_texts(differ, one):
    logprobs = np.zeros((3, TEXTS, 7))
    logprobs[0, :differ] = 1e-3
    row = closeness(Texts(logprobs, one.greedy), one)
    assert row["ratio"] is None and row["ratio_interval"] is None
