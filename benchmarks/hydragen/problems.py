"""(d) Two levels of sharing: few-shot examples above problems above samples, as in competitive programming."""

from __future__ import annotations

from functools import partial

from benchmarks.hydragen.cases import Case
from benchmarks.hydragen.jobs import Job, Row
from benchmarks.hydragen.step import Rig
from benchmarks.hydragen.throughput import step_row

LETTER = "d"
METHODS_HERE = ("flash", "hydragen", "hydragen, two levels", "ours")
# Shape: (problems, samples of each, few-shot tokens, tokens of a problem, new tokens, priority).
CASES = {
    "Llama-3.1-8B": [(8, 128, 2400, 400, 256, 1), (2, 128, 2400, 400, 256, 3), (16, 128, 2400, 400, 256, 2)],
    "CodeLlama-7B": [(4, 128, 2400, 400, 256, 1), (2, 128, 2400, 400, 256, 2)],
    "tiny": [(2, 4, 48, 24, 8, 1)],
}


def jobs(shapes: list[str]) -> list[Job]:
    found = []
    for shape in shapes:
        for problems, samples, shots, problem, new, priority in CASES.get(shape, []):
            case = Case(((1, shots), (problems, problem)), problems * samples, new)
            name = f"{problems} problems x {samples} samples"
            found.append(Job(LETTER, shape, name, priority, 9.0, partial(_row, case)))
    return found


def _row(case: Case, rig: Rig) -> Row:
    row = step_row(case, rig, METHODS_HERE, compiled=())
    row["methods"] = {name: _with_total(found, case) for name, found in row["methods"].items()}
    return row


def _with_total(found: Row, case: Case) -> Row:
    return found | ({"decode_s": round(found["step_ms"] * case.new / 1e3, 3)} if "step_ms" in found else {})
