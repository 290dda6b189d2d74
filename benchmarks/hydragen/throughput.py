"""(a) Decoding: tokens per second of batches that share a prefix, over batch, prefix and tokens drawn."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.hydragen.cases import Case, mean, two_level
from benchmarks.hydragen.engine_runs import engine_job, stock_jobs
from benchmarks.hydragen.jobs import Job, Row
from benchmarks.hydragen.step import Rig

LETTER = "a"
EAGER = ("flash", "hydragen", "ours")
COMPILED = ("ours", "hydragen")
SMALLER_FLASH = "flash, fewer at a time"
# What a step may take beside the compiled ceiling: so much of attention's floor, and so much of all.
FLOORS, SLACK = 1.35, 0.03
# Shape: (batch, prefix, new tokens, priority); both axes of the paper through (middle batch, 2K).
CASES = {
    "CodeLlama-7B": [
        (256, 2048, 128, 1),
        (32, 2048, 128, 1),
        (512, 16384, 128, 1),
        (1024, 2048, 128, 1),
        (512, 1024, 128, 2),
        (512, 4096, 128, 2),
        (64, 2048, 128, 2),
        (128, 2048, 128, 3),
        (512, 2048, 256, 2),
        (512, 2048, 128, 2),
        (512, 8192, 128, 3),
        (2048, 2048, 128, 3),
    ],
    "Llama-3.1-8B": [
        (256, 2048, 128, 1),
        (1024, 2048, 128, 1),
        (1024, 16384, 128, 1),
        (4096, 2048, 128, 1),
        (32, 2048, 128, 2),
        (64, 2048, 128, 2),
        (1024, 1024, 128, 2),
        (1024, 4096, 128, 2),
        (1024, 8192, 128, 3),
        (2048, 2048, 128, 3),
        (1024, 2048, 256, 2),
        (4096, 16384, 128, 3),
    ],
    "CodeLlama-13B": [
        (256, 2048, 128, 2),
        (32, 2048, 128, 2),
        (512, 16384, 128, 2),
        (512, 2048, 128, 2),
        (512, 1024, 128, 3),
        (512, 4096, 128, 3),
        (256, 2048, 256, 3),
        (1024, 2048, 128, 3),
    ],
    "tiny": [(8, 64, 8, 1), (16, 32, 4, 2)],
}
ENGINE = {
    "CodeLlama-7B": [(256, 2048, 128, 1)],
    "Llama-3.1-8B": [(64, 2048, 128, 1), (256, 2048, 128, 1), (1024, 2048, 128, 1), (4096, 2048, 128, 1)],
    "tiny": [(4, 32, 6, 1)],
}


def jobs(shapes: list[str]) -> list[Job]:
    found = []
    for shape in shapes:
        for batch, prefix, new, priority in CASES.get(shape, []):
            case = two_level(batch, prefix, new)
            name = f"b{batch} p{prefix} n{new}"
            found.append(Job(LETTER, shape, name, priority, 8.0, partial(_row, case)))
        for batch, prefix, new, priority in ENGINE.get(shape, []):
            found.append(engine_job(LETTER, shape, batch, prefix, new, priority))
    return found + stock_jobs(LETTER, shapes)


def _row(case: Case, rig: Rig) -> Row:
    """Where flash does not fit, also what it reaches at the largest batch that does."""
    row = step_row(case, rig)
    if "step_ms" not in row["methods"]["flash"]:
        row["methods"][SMALLER_FLASH] = _smaller_flash(case, rig)
    return row


def _smaller_flash(case: Case, rig: Rig) -> Row:
    batch = case.batch
    while batch > 1 and not rig.fits("flash", replace(case, batch=batch)):
        batch //= 2
    smaller = replace(case, batch=batch)
    if smaller not in rig.smaller:
        rig.smaller[smaller] = rig.measure("flash", rig.state(smaller)) | {"batch": batch}
    return rig.smaller[smaller]


def step_row(case: Case, rig: Rig, methods: tuple[str, ...] = EAGER, compiled: tuple[str, ...] = COMPILED) -> Row:
    """A case with every method: in the model's own modules, and where they are compiled."""
    state = rig.state(case)
    floors = {drawn: case.floor_ms(rig.shape, drawn) for drawn in case.lengths}
    measured: dict[str, Row] = {"none": rig.ceiling(state, False)}
    if compiled:
        measured["none, compiled"] = rig.ceiling(state, True)
    for method in methods:
        measured[method] = rig.measure(method, state)
    for method in compiled:
        measured[f"{method}, compiled"] = rig.measure(method, state, compiled=True)
    floor = mean(floors)
    row: Row = {
        "kind": "step",
        "case": case.facts(),
        "floor_ms": round(floor, 4),
        "floors_ms": {str(drawn): round(ms, 4) for drawn, ms in floors.items()},
        "methods": measured,
    }
    ceiling = measured.get("none, compiled", {}).get("step_ms")
    if ceiling:
        row["aim_ms"] = round((ceiling + FLOORS * floor) * (1 + SLACK), 4)
    return row
