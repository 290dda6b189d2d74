"""The benchmark of Hydragen's experiments, on a CPU: its counts, its methods' answers, and all of it end to end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.hydragen.__main__ import TABLE, main, run_jobs
from benchmarks.hydragen.experiments import SMALLER_FLASH, Rig, differences, steps
from benchmarks.hydragen.methods import METHODS, Case, Parts
from benchmarks.hydragen.report import SECTIONS, number
from benchmarks.runner import ROOT
from benchmarks.shapes import LLAMA_8B, TINY
from benchmarks.tree_attention.workloads import workload
from prefixkit.ops import library

CPU = torch.device("cpu")


def two_level(batch, prefix, new, private=0):
    return Case(((1, prefix),), batch, new, private)


def test_floors_are_those_of_the_workloads():
    shape, case = LLAMA_8B, two_level(256, 4096, 128)
    assert case.floor_ms(shape, 128) == pytest.approx(
        shape.layers * workload("2L b256 p4096 s128", 32, 8).floor_us / 1e3
    )


def test_what_each_method_holds():
    case = Case(((1, 100), (4, 40)), batch=16, new=8, private=3)
    held = {name: kind.tokens_held(case) for name, kind in METHODS.items()}
    assert held == {
        "none": 0,
        "flash": 16 * 151,
        "hydragen": 100 + 16 * 51,
        "hydragen, two levels": 100 + 160 + 16 * 11,
        **dict.fromkeys(("ours", "ours, sharing", "ours, not sharing"), 112 + 4 * 48 + 16 * 16),
    }


def test_a_cases_tree_is_in_depth_first_order():
    case, rig = Case(((1, 20), (2, 5)), batch=4, new=6, private=1), Rig(TINY, CPU)
    step = case.step(6, rig.planner(), CPU)
    snapshot = step.plans[0].tree.snapshot
    assert snapshot.parent.tolist() == [-1, 0, 1, 1, 0, 4, 4]
    assert snapshot.length.tolist() == [20, 5, 7, 7, 5, 7, 7]
    assert step.positions.tolist() == [31] * 4


def test_levels_must_divide():
    with pytest.raises(ValueError, match="multiple of the nodes above it"):
        Case(((2, 10), (3, 10)), batch=6, new=4).step(1, Rig(TINY, CPU).planner(), CPU)


def test_a_mean_step_weighs_the_middle_twice():
    case = two_level(1, 1, 8)
    assert case.mean({1: 1.0, 4: 2.0, 8: 3.0}.__getitem__) == 2.0
    assert case.mean({1: 1.0, 4: 1.0, 8: 5.0}.__getitem__) == 2.0


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_all_methods_compute_the_same(kv_heads):
    found = differences(Rig(replace(TINY, kv_heads=kv_heads), CPU))
    assert set(found) == {name for name, kind in METHODS.items() if issubclass(kind, Parts)}
    # Float32 on both sides, sums of fewer than 300 terms.
    assert all(by < 1e-5 for by in found.values()), found


def test_a_method_that_forgets_what_is_appended_differs(monkeypatch):
    monkeypatch.setattr(Parts, "kv_append", lambda *_: None)
    assert all(by > 0.02 for by in differences(Rig(TINY, CPU)).values())


def test_a_method_that_differs_is_not_measured():
    rig, case = Rig(TINY, CPU), two_level(2, 16, 4)
    rig.differ = {"flash": 0.001, "hydragen": 0.5, "hydragen, two levels": "TypeError: no"}
    assert "step_ms" in rig.measure("flash", case)
    assert rig.measure("hydragen", case) == {"skipped": "differs from ours by 0.5 of the norm"}
    assert rig.measure("hydragen, two levels", case) == {"skipped": "TypeError: no"}


def test_what_does_not_fit_is_a_result():
    found = Rig(TINY, CPU).measure("flash", two_level(64, 4096, 4))
    assert found["skipped"].startswith("does not fit: KV of 0.1 GB")


def test_flash_gets_the_largest_batch_that_fits():
    rig = Rig(TINY, CPU, capacity=1 << 18)
    row = steps(rig, two_level(16, 128, 4), ["flash"])
    found = row["methods"][SMALLER_FLASH]
    per_sequence = 132 * rig.spec().bytes_per_token
    assert found["batch"] * per_sequence <= rig.capacity < 2 * found["batch"] * per_sequence
    assert number(row, SMALLER_FLASH, "tokens_per_s") == found["tokens_per_s"] > 0


def test_no_sharing_is_a_plan_that_reads_each_path():
    rig, case = Rig(TINY, CPU), two_level(4, 64, 4)
    step = case.step(4, rig.planner(shares=False), CPU)
    assert len(set(step.kv_tokens)) == 1


@pytest.mark.parametrize("method", ["none", "hydragen", "ours"])
def test_compiled_modules_choose_the_models_tokens(method):
    rig, case = Rig(TINY, CPU), two_level(6, 24, 8)
    core, before = rig.core(method, case), library.backend_for
    core.at(case.step(3, rig.planner(), CPU))
    first, chosen = core.now.tokens.clone(), []
    for compiled in (False, True):
        core.now.tokens.copy_(first)
        with torch.no_grad(), core.installed():
            rig.step(core, compiled)()
        chosen.append(core.now.tokens.clone())
    assert torch.equal(*chosen) and library.backend_for is before


def test_time_is_shared_between_shapes_and_what_is_late_says_so():
    def jobs():
        order = [("x", 2), ("x", 1), ("y", 2), ("y", 1), ("y", 3)]
        runs = [lambda rig: {}] * 4 + [lambda rig: {"of": rig.missing}]
        named = [{"shape": shape, "name": f"{shape} {at}", "priority": at} for shape, at in order]
        return [job | {"run": run} for job, run in zip(named, runs, strict=True)]

    rows: dict[str, dict[str, object]] = {}
    run_jobs(jobs(), lambda name: Rig(TINY, CPU), 1e6, lambda row: rows.update({row["name"]: row}))
    assert list(rows) == ["x 1", "x 2", "y 1", "y 2", "y 3"]
    assert rows["y 3"]["skipped"].startswith("AttributeError")
    run_jobs(jobs(), lambda name: Rig(TINY, CPU), 0.0, lambda row: rows.update({row["name"]: row}))
    assert {row["skipped"] for row in rows.values()} == {"out of time"}


def test_everything_end_to_end(tmp_path, capsys):
    main(["--shape", "tiny", "--out", str(tmp_path / "run")])
    found = json.loads((tmp_path / "run" / "hydragen.json").read_text())
    assert {row["experiment"] for row in found["rows"]} == set(TABLE)
    assert not [row for row in found["rows"] if "skipped" in row]
    methods = [row["methods"] for row in found["rows"] if "methods" in row]
    assert not [method for row in methods for method in row.values() if "skipped" in method]
    page = (tmp_path / "run" / "hydragen.md").read_text()
    assert page.count("\ntiny:\n") == len(TABLE) == len(SECTIONS)


def test_a_run_takes_up_what_an_earlier_one_had_no_time_for(tmp_path, capsys):
    main(["--shape", "tiny", "--only", "a,n", "--seconds", "1e-9", "--out", str(tmp_path / "first")])
    before = json.loads((tmp_path / "first" / "hydragen.json").read_text())
    assert {row["skipped"] for row in before["rows"]} == {"out of time"}
    before["rows"][0] = {**before["rows"][0], "skipped": "done, as it were"}
    (tmp_path / "some.json").write_text(json.dumps(before))
    options = ["--shape", "tiny", "--only", "a,n", "--out", str(tmp_path / "second")]
    main([*options, "--resume", str(tmp_path / "some.json")])
    after = json.loads((tmp_path / "second" / "hydragen.json").read_text())
    assert after["rows"][0] == before["rows"][0]
    assert [row["name"] for row in after["rows"]] == [row["name"] for row in before["rows"]]
    assert not [row for row in after["rows"][1:] if "skipped" in row]
    before["machine"] = {"gpu": "another"}
    (tmp_path / "some.json").write_text(json.dumps(before))
    with pytest.raises(SystemExit, match="another machine"):
        main([*options, "--resume", str(tmp_path / "some.json")])


def test_only_takes_known_experiments(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "a,z"])
    assert "got z" in capsys.readouterr().err


def test_the_page_is_made_again_from_the_recorded_results(tmp_path, capsys):
    main(["--report", str(ROOT / "benchmarks" / "results" / "h200_hydragen.json"), "--docs", str(tmp_path)])
    assert (tmp_path / "hydragen.md").read_text() == (ROOT / "docs" / "appendix" / "hydragen.md").read_text()
