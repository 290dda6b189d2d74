"""What the benchmarks count, without a GPU: floors, levels, summaries."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import attention as report
from benchmarks.tree_attention.prefill import Prompts
from benchmarks.tree_attention.workloads import DECODE, HEADS, levels, workload

ALL = [(*heads, name) for heads in HEADS for name in DECODE]


def test_the_87_workloads_are_those_of_the_anchors():
    assert sorted(ALL) == sorted(report.anchors())


@pytest.mark.parametrize(("heads", "kv_heads", "name"), ALL[:: len(DECODE) // 3])
def test_floors_are_those_of_the_anchors(heads, kv_heads, name):
    known, ours = report.anchors()[heads, kv_heads, name], workload(name, heads, kv_heads)
    assert ours.kv_bytes == known["kv_bytes"]
    assert ours.floor_us == pytest.approx(known["floor_us"], abs=0.006)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2L b64 p1024 s16", [((1, 64), 64), ((64, 1), 1)]),
        ("beam d6", [((1, 128), 64), *(((2**d, 4), 64 // 2**d) for d in range(1, 7))]),
        ("chain d4 b8 p64 t32", [((1, 4), 8), ((8, 8), 1)]),
    ],
)
def test_levels_of_regular_trees(name, expected):
    snapshot = workload(name, 8, 1).snapshot
    found = levels(snapshot, snapshot.pages)
    assert [(level.pages.shape, level.rows) for level in found] == expected
    pages = np.concatenate([level.pages.reshape(-1) for level in found])
    assert np.array_equal(np.sort(pages), np.sort(snapshot.pages))


def test_a_comb_has_no_levels():
    snapshot = workload("comb d4 b2 t16 s32", 8, 1).snapshot
    assert levels(snapshot, snapshot.pages) is None


def test_prompts_that_share_save_what_is_computed_once():
    alone, of_rivals = Prompts("", 16, 16, count=4).flops(1)
    assert alone == of_rivals
    tree, each = Prompts("", 16, 16, count=4, prefix=48, cached=False).flops(1)
    pairs = 48 * 49 / 2 + 4 * sum(range(49, 65))
    assert tree == 4 * 128 * pairs
    assert each == 4 * 128 * 4 * 64 * 65 / 2


def test_a_summary_says_who_is_behind():
    rows = [
        {"heads": [8, 1], "workload": "a", "us": 50.0, "floor_us": 40.0, "rivals": {"x": 100.0, "y": "why"}},
        {"heads": [8, 1], "workload": "b", "us": 9.0, "floor_us": 1.0, "rivals": {"x": 4.5}, "anchor": {"us": 18.0}},
    ]
    found = report.summary(rows)
    assert found["best rival / ours"] == {"geomean": 1.0, "ahead": 1, "of": 2, "least": ["8/1 b", 0.5]}
    assert found["best anchor / ours"]["geomean"] == 2.0
    assert found["time / floor, floor above 30 us"]["geomean"] == 1.25
    assert found["us above floor, floor below 10 us"]["mean"] == 8.0
    assert report.compare(rows[:1], [{**rows[0], "us": 25.0}]) == {"geomean": 2.0, "each": {"8/1 a": 2.0}}
    assert report.skipped(rows) == {"y": {"why": 1}}
