"""What the benchmark of CPUs makes of its measurements; the measurements themselves take minutes."""

import sys

import torch
from torch import nn

from benchmarks.cpu_sampling import LLAMA_WAYS, Llama, linear_ms, medians, report

# Stands in for an interpreter with llama-cpp-python: fastest with one buffer for each sequence and flash attention.
FAKE = f"""#!{sys.executable}
import json, sys
job = json.load(sys.stdin)
step = 5.0 if (job["kv"], job["flash"]) == ("each", 1) else 9.0
print(json.dumps({{"tokens": 4 * job["new"], "seconds": 2.0, "cpu_seconds": 1.0, "step_cpu_ms": step, **job}}))
"""


def test_llama_cpp_is_measured_in_the_way_that_was_fastest_in_short_runs(tmp_path):
    fake = tmp_path / "python"
    fake.write_text(FAKE)
    fake.chmod(0o700)
    llama = Llama(str(fake), {"prompt": [1, 2]}, new=64)
    row = llama.measure("F32")
    assert len(LLAMA_WAYS) == 4 and llama.ways == {"F32": {"kv": "each", "flash": 1}}
    assert (row["format"], row["new"], row["kv"], row["flash"]) == ("F32", 64, "each", 1)
    assert (row["tokens_per_second"], row["tokens_per_cpu_second"]) == (128, 256)


def test_linear_layers_of_any_dtype_are_timed_on_their_own_inputs():
    rows, layer = [], nn.Linear(3, 5)
    layer.register_forward_hook(lambda module, given, out: rows.append(given[0].shape))
    times = linear_ms(nn.Sequential(layer, nn.Linear(5, 2).to(torch.bfloat16)), 7, repeats=2)
    assert len(times) == 2 and min(times) > 0 and rows == [(7, 3)] * 3


def test_a_report_compares_every_system_with_prefixkit_in_each_dtype():
    row = {"seconds": 8.0, "cpu_seconds": 4.0, "tokens_per_second": 10.0, "tokens_per_cpu_second": 20.0}
    fast = {name: value / 2 if name.endswith("seconds") else 2 * value for name, value in row.items()}
    shown = report({"prefixkit bfloat16": fast, "llama.cpp F32": row | {"step_cpu_ms": 300.4}})
    assert shown.splitlines()[-1] == "| llama.cpp F32 | 8.0 | 4.0 | 10.0 | 300 |  |  | 2.00x, 2.00x |"


def test_medians_are_of_numbers():
    rows = [{"seconds": value, "kv": "each"} for value in (3.0, 1.0, 2.0)]
    assert medians(rows) == {"seconds": 2.0}
