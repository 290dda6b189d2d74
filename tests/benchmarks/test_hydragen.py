"""The benchmark of Hydragen's experiments, on a CPU: its counts, its methods' answers, and all of it end to end."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.hydragen.__main__ import LETTERS, Job, main, run_jobs
from benchmarks.hydragen.cases import Case, TreeState, case_tree, mean, two_level
from benchmarks.hydragen.experiments import SMALLER_FLASH, throughput
from benchmarks.hydragen.methods import CPU_BYTES, METHODS, Arena, DoesNotFit, Parts
from benchmarks.hydragen.report import number
from benchmarks.hydragen.step import CompiledStep, Rig, complaints, differences
from benchmarks.shapes import LLAMA_8B, TINY
from benchmarks.tree_attention.workloads import workload
from prefixkit.attention.gpu_cost import H200
from prefixkit.attention.sharing import HeadShape
from prefixkit.backends.cuda.device_planner import CudaPlanner
from prefixkit.models.step_cache import CacheLayer

CPU = torch.device("cpu")


def test_floors_are_those_of_the_workloads():
    shape, case = LLAMA_8B, two_level(256, 4096, 128)
    assert case.floor_ms(shape, 128) == pytest.approx(
        shape.layers * workload("2L b256 p4096 s128", 32, 8).floor_us / 1e3
    )


def test_what_each_method_holds():
    case = Case(((1, 100), (4, 40)), batch=16, new=8, private=3)
    held = {name: kind.kv_bytes(case, 1) for name, kind in METHODS.items()}
    assert held == {
        "none": 0,
        "flash": 16 * 151,
        "hydragen": 100 + 16 * 51,
        "hydragen, two levels": 100 + 160 + 16 * 11,
        "ours": 112 + 4 * 48 + 16 * 16,
    }


def test_a_cases_tree_is_in_depth_first_order():
    snapshot, nodes = case_tree(Case(((1, 20), (2, 5)), batch=4, new=6, private=1))
    assert snapshot.parent.tolist() == [-1, 0, 1, 1, 0, 4, 4]
    assert [of.tolist() for of in nodes] == [[0], [1, 4], [2, 3, 5, 6]]
    assert snapshot.length.tolist() == [20, 5, 7, 7, 5, 7, 7]


def test_levels_must_divide():
    with pytest.raises(ValueError, match="multiple of the nodes above it"):
        Case(((2, 10), (3, 10)), batch=6, new=4)


def test_a_mean_step_weighs_the_middle_twice():
    assert mean({1: 1.0, 4: 2.0, 8: 3.0}) == 2.0
    assert mean({1: 1.0, 4: 1.0, 8: 5.0}) == 2.0


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_all_methods_compute_the_same(kv_heads):
    found = differences(Rig(replace(TINY, kv_heads=kv_heads), CPU))
    assert set(found) == {name for name, kind in METHODS.items() if issubclass(kind, Parts)}
    # Float32 on both sides, sums of fewer than 300 terms.
    assert all(by < 1e-5 for by in found.values()), found


def test_a_method_that_differs_is_not_measured():
    rig = Rig(TINY, CPU)
    rig.wrong = complaints({"flash": 0.001, "hydragen": 0.5, "hydragen, two levels": "TypeError: no"})
    state = rig.state(two_level(2, 16, 4))
    assert "step_ms" in rig.measure("flash", state)
    assert rig.measure("hydragen", state) == {"skipped": "ValueError: differs from ours by 0.5 of the norm"}
    assert rig.measure("hydragen, two levels", state) == {"skipped": "ValueError: TypeError: no"}


def test_what_does_not_fit_is_a_result():
    rig = Rig(TINY, CPU)
    found = rig.measure("flash", rig.state(two_level(64, 4096, 4)))
    assert found["skipped"].startswith("does not fit: KV of 0.1 GB")
    with pytest.raises(DoesNotFit):
        Arena(CPU, torch.float32, 4000).take(1001)


def test_flash_gets_the_largest_batch_that_fits():
    rig = Rig(TINY, CPU)
    row = throughput(rig, 64, 4096, 4)
    found = row["methods"][SMALLER_FLASH]
    per_sequence = 4100 * rig.spec().bytes_per_token
    assert found["batch"] * per_sequence <= CPU_BYTES < 2 * found["batch"] * per_sequence
    assert number(row, SMALLER_FLASH, "tokens_per_s") == found["tokens_per_s"] > 0


def test_a_step_grows_in_place():
    state = Rig(TINY, CPU).state(two_level(3, 20, 8, private=2))
    kept = state.step
    state.at(5)
    assert state.step.positions is kept.positions and state.step.slots is kept.slots
    assert kept.positions.tolist() == [26] * 3
    assert state.step.length.tolist() == [20, 7, 7, 7]
    assert state.planner.plans_made == 2


def test_no_sharing_is_a_plan_that_reads_each_path():
    rig = Rig(TINY, CPU)
    case = two_level(4, 64, 4)
    reads = [rig.state(case, share).step for share in (True, False)]
    assert reads[1].kv_tokens_read == reads[1].kv_tokens_unshared


@pytest.mark.parametrize("method", ["none", "hydragen", "ours"])
def test_compiled_modules_choose_the_models_tokens(method):
    rig = Rig(TINY, CPU)
    state = rig.state(two_level(6, 24, 8))
    core = rig.core(method, state)
    core.at(3)
    before = CacheLayer.update, CacheLayer.attend
    with torch.no_grad():
        first = state.step.tokens.clone()
        by_functions = CompiledStep(rig.model, compile=False)(first, state.step.positions, core)
        with core.installed():
            rig.step(core)()
    assert torch.equal(state.step.tokens, by_functions)
    assert (CacheLayer.update, CacheLayer.attend) == before


def test_time_is_shared_between_shapes_and_what_is_late_says_so():
    jobs = [
        Job("a", shape, f"{shape} {priority}", priority, 1.0, lambda rig: {}) for shape in "xy" for priority in (2, 1)
    ]
    jobs.append(Job("a", "y", "y 3", 3, 1.0, lambda rig: {"of": rig.missing}))
    rows: dict[str, dict[str, object]] = {}
    run_jobs(jobs, lambda name: Rig(TINY, CPU), 1e6, lambda job, row: rows.update({job.name: row}))
    assert list(rows) == ["x 1", "x 2", "y 1", "y 2", "y 3"]
    assert rows["y 3"]["skipped"].startswith("AttributeError")
    run_jobs(jobs, lambda name: Rig(TINY, CPU), 0.0, lambda job, row: rows.update({job.name: row}))
    assert {row["skipped"] for row in rows.values()} == {"out of time"}


def test_everything_end_to_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    main(["--shape", "tiny", "--out", str(tmp_path / "run")])
    found = json.loads((tmp_path / "run" / "hydragen.json").read_text())
    assert {row["experiment"] for row in found["rows"]} == set(LETTERS)
    assert not [row for row in found["rows"] if "skipped" in row]
    methods = [row["methods"] for row in found["rows"] if "methods" in row]
    assert not [method for row in methods for method in row.values() if "skipped" in method]
    main(["--report", str(tmp_path / "run" / "hydragen.json"), "--docs", str(tmp_path / "docs")])
    page = (tmp_path / "docs" / "hydragen.md").read_text()
    assert page == (tmp_path / "run" / "hydragen.md").read_text()
    pictures = {path.name for path in (tmp_path / "docs" / "hydragen").iterdir()}
    assert all(f"](hydragen/{name})" in page for name in pictures) and len(pictures) == len(LETTERS)


def test_a_run_takes_up_what_an_earlier_one_had_no_time_for(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    main(["--shape", "tiny", "--only", "b,n", "--seconds", "1e-9", "--out", str(tmp_path / "first")])
    before = json.loads((tmp_path / "first" / "hydragen.json").read_text())
    assert {row["skipped"] for row in before["rows"]} == {"out of time"}
    before["rows"][0] = {**before["rows"][0], "skipped": "done, as it were"}
    (tmp_path / "some.json").write_text(json.dumps(before))
    options = ["--shape", "tiny", "--only", "b,n", "--out", str(tmp_path / "second")]
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


def test_a_gpus_plan_of_any_length_is_in_tensors_that_stay():
    state = TreeState(two_level(40, 300, 64), CudaPlanner(HeadShape(4, 2, 16, 2), H200, 132), CPU)
    addresses = [tensor.data_ptr() for tensor in state.step.plan]
    for new in (1, 40, 64):
        state.at(new)
        assert [tensor.data_ptr() for tensor in state.step.plan] == addresses
        planned = state.step.planned
        arrays = (*planned.plan.arrays(), *planned.tree.arrays())
        for ours, expected in zip(state.step.plan, arrays, strict=True):
            assert np.array_equal(ours[: len(expected)].numpy(), expected)
