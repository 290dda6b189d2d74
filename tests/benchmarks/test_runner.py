"""What all benchmarks share: turns, the record of a run, taking up an earlier one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare import Checkout, main, summary, times_of
from benchmarks.runner import OUT_OF_TIME, ROOT, Run, arguments, identity, in_turns, spread


def options(*given: object):
    return arguments("", [str(one) for one in given], seconds=1e9, resume=True)


def test_contenders_take_turns_in_alternating_order():
    order: list[str] = []
    times = in_turns({name: lambda name=name: order.append(name) or len(order) for name in ("old", "new")}, turns=3)
    assert order == ["old", "new", "new", "old", "old", "new"]
    assert times == {"old": [1, 4, 5], "new": [2, 3, 6]}


def test_a_spread_has_its_median_between_its_ends():
    assert spread([3.0, 1.0, 2.0])["median"] == 2.0
    assert spread([3.0, 1.0, 2.0])["best"] == 1.0 and spread([3.0, 1.0, 2.0])["worst"] == 3.0


def test_a_run_takes_up_the_rows_of_an_earlier_one(tmp_path: Path):
    first = Run(options("--out", tmp_path / "first.json"), "cpu")
    first.add("rows", {"name": "a", "us": 1.0})
    first.add("rows", {"name": "b", "skipped": OUT_OF_TIME})
    second = Run(options("--resume", tmp_path / "first.json"), "cpu")
    assert second.taken_up("rows", ("name",)) == {identity({"name": "a"}, ("name",))}
    assert second.result["rows"] == [{"name": "a", "us": 1.0}]
    record = json.loads((tmp_path / "first.json").read_text()) | {"machine": {"gpu": "another"}}
    (tmp_path / "other.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="another machine"):
        Run(options("--resume", tmp_path / "other.json"), "cpu").taken_up("rows", ("name",))


def test_a_comparison_times_both_checkouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = [
        "--old",
        ROOT,
        "--cases",
        "tree",
        "--small",
        "--turns",
        "2",
        "--fresh",
        "2",
        "--out",
        tmp_path / "out.json",
    ]
    found = main([str(one) for one in given])
    rows = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [row["kind"] for row in rows] == ["tree"] and found["all"]["cases"] == 1
    for row in rows:
        assert row["old"] > 0 and row["new"] > 0 and row["least"] <= row["ratio"] <= row["most"]


def test_a_comparison_starts_processes_anew_every_few_turns():
    class Noting(Checkout):
        """Notes what it is told to do, and starts no process."""

        def start(self) -> None:
            told.append(f"start {self.name}")

        def close(self) -> None:
            told.append(f"close {self.name}")

        def ask(self, what: str, case: object = None) -> float:
            told.append(f"{what} {self.name}")
            return 1.0

    told: list[str] = []
    checkouts = [Noting(name, ROOT) for name in ("old", "new")]
    assert times_of({"kind": "tree"}, checkouts, turns=3, fresh=2) == {"old": [1.0] * 3, "new": [1.0] * 3}
    prepared = ["prepare old", "prepare new"]
    again = ["close old", "start old", "prepare old", "close new", "start new", "prepare new"]
    two_turns = ["time old", "time new", "time new", "time old"]
    assert told == ["start old", "start new", *prepared, *two_turns, *again, "time old", "time new"]


def test_a_summary_of_a_comparison_names_the_worst_case():
    rows = [{"kind": "a", "name": "x", "ratio": 2.0}, {"kind": "a", "name": "y", "ratio": 0.5}]
    rows.append({"kind": "b", "name": "z", "skipped": "why"})
    found = summary(rows)
    assert found["all"] == {"cases": 2, "skipped": 1, "new/old": 1.0, "worst": "x", "most": 2.0}
    assert found["b"]["skipped"] == 1


def test_a_comparison_asks_for_a_checkout(tmp_path: Path):
    with pytest.raises(SystemExit, match="takes a checkout"):
        main(["--old", str(tmp_path), "--cases", "tree"])
