"""Decode workloads: ours, every rival that fits, the recorded anchor, one after the other on the same numbers."""

from __future__ import annotations

import time

import torch

from benchmarks.tree_attention import report
from benchmarks.tree_attention.inputs import Inputs, Pool, make, ours
from benchmarks.tree_attention.rivals import RIVALS, Unfit
from benchmarks.tree_attention.timing import replay_us
from benchmarks.tree_attention.workloads import workload

# Two bf16 kernels differ by rounding: about 0.3% of the output's norm.
MOST_DIFFERENCE = 0.02


def measure(names: list[tuple[int, int, str]], rivals: list[str], shuffled: bool, seconds: float) -> list[report.Row]:
    """Rows of :func:`report.line` for workloads given as (query heads, KV heads, name).

    After ``seconds`` no more rivals begin.
    """
    known, pool, began = report.anchors(), Pool(), time.monotonic()
    rows = []
    for heads, kv_heads, name in names:
        inputs = make(workload(name, heads, kv_heads), pool, shuffled)
        row: report.Row = {
            "heads": [heads, kv_heads],
            "workload": name,
            "floor_us": round(inputs.workload.floor_us, 2),
            "us": round(replay_us(lambda i, of=inputs: ours(of, i), inputs.sets), 2),
            "plan_ms": round(inputs.plan_ms, 2),
            "input_sets": inputs.sets,
            "rivals": {},
        }
        anchor = known.get((heads, kv_heads, name))
        if anchor:
            row["anchor"] = {"best": anchor["best"], "us": anchor["best_us"]}
        expected = ours(inputs, 0)
        for rival in rivals:
            left = seconds - (time.monotonic() - began)
            row["rivals"][rival] = _against(rival, inputs, expected) if left > 0 else "out of time"
        rows.append(row)
        print(report.line(row), flush=True)
        del inputs, expected
    return rows


def _against(name: str, inputs: Inputs, expected: torch.Tensor) -> float | str:
    """A rival's time, or why there is none."""
    try:
        run = RIVALS[name](inputs)
        difference = float((run(0).float() - expected.float()).norm() / expected.float().norm())
        if not difference < MOST_DIFFERENCE:
            return f"differs from ours by {difference:.3f} of the norm"
        return round(replay_us(run, inputs.sets), 2)
    except Unfit as error:
        return str(error)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    except Exception as error:  # a rival's failure is a result, not ours to mend
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
