"""(n) Parallel generation: latency between tokens when each of several requests asks for n samples, sharing on and off."""

from __future__ import annotations

from functools import partial

from benchmarks.hydragen.cases import Case, mean
from benchmarks.hydragen.engine_runs import engine_seconds, tokens
from benchmarks.hydragen.jobs import Job, Row
from benchmarks.hydragen.step import Rig

LETTER = "n"
# Shape: requests at a time, tokens of each prompt, new tokens; samples of each: with their priority.
CASES = {
    "Llama-3.1-8B": (16, 1024, 128, {1: 1, 2: 2, 4: 2, 8: 1, 16: 2, 32: 2, 64: 1}),
    "tiny": (2, 32, 8, {1: 1, 2: 1}),
}
ENGINE = {"Llama-3.1-8B": (8, 64), "tiny": (2,)}


def jobs(shapes: list[str]) -> list[Job]:
    found = []
    for shape in shapes:
        requests, prompt, new, samples = CASES.get(shape, (0, 0, 0, {}))
        for n, priority in samples.items():
            case = Case(((requests, prompt),), requests * n, new)
            found.append(Job(LETTER, shape, f"n={n}", priority, 5.0, partial(_row, case, n)))
        for n in ENGINE.get(shape, ()):
            found.append(Job(LETTER, shape, f"engine n={n}", 2, 8.0, partial(_engine, requests, prompt, new, n)))
    return found


def _row(case: Case, n: int, rig: Rig) -> Row:
    floor = mean({drawn: case.floor_ms(rig.shape, drawn) for drawn in case.lengths})
    on, off = rig.state(case), rig.state(case, share=False)
    return {
        "kind": "step",
        "n": n,
        "case": case.facts(),
        "floor_ms": round(floor, 4),
        "methods": {
            "none": rig.ceiling(on, False),
            "ours, sharing": rig.measure("ours", on),
            "ours, not sharing": rig.measure("ours", off),
            "hydragen": rig.measure("hydragen", on),
        },
    }


def _engine(requests: int, prompt: int, new: int, n: int, rig: Rig) -> Row:
    """What a token more takes a run: the difference between a long run and a short one."""
    prompts = [tokens(prompt, rig.shape.vocab, seed=50 + index) for index in range(requests)]
    few = max(new // 4, 2)
    engine_seconds(rig, prompts, n, 2)
    short, long = (engine_seconds(rig, prompts, n, count)["seconds"] for count in (few, new))
    latency = (long - short) / (new - few) * 1e3
    return {"kind": "engine", "n": n, "case": {"requests": requests, "prompt": prompt}, "step_ms": round(latency, 3)}
