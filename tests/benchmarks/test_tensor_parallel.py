"""The benchmark of split models, in one process: what it measures, and what it says beside an earlier run."""

from __future__ import annotations

import json

from benchmarks.tensor_parallel import beside, main


def test_a_run_says_what_it_is_beside_another(tmp_path):
    out = tmp_path / "one.json"
    main(["--shape", "tiny", "--rows", "3", "--prompt", "40", "--new", "36", "--steps", "6", "--out", str(out)])
    found = json.loads(out.read_text())
    (preempted,) = found["preempted"]
    assert preempted["preempted_swapped"] + preempted["preempted_recomputed"] > 0
    (equal,), (step,), (generated,) = found["equal"], found["steps"], found["generate"]
    parted = {**equal, "greedy": [[*one[:4], -1, one[5]] for one in equal["greedy"]]}
    said = beside({**parted, "together": [one + 0.5 for one in equal["together"]]}, "equal", ("steps",), found)
    assert said["greedy_equal_until"] == [4] * 4
    assert abs(said["difference_of_processes"] - 0.5) < 1e-6
    assert 0 <= said["difference_of_batches"] < 1e-5
    half = {**step, "step_ms": step["step_ms"] / 2}
    assert beside(half, "steps", ("rows", "prompt", "new"), found) == {"of_one_process": 0.5}
    assert beside(generated, "generate", ("rows",), found) == {"of_one_process": 1.0}
    assert beside({**step, "rows": 4}, "steps", ("rows",), found) == {}
