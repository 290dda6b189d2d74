"""Whole calls of a session on one GPU, random bf16 weights: their time beyond their steps, and steps of beams.

    python -m benchmarks.calls [--shapes Llama-3.2-1B,Qwen2.5-7B] [--parts calls,short,shrinking,beams] [--turns 5]

*calls*: 4 prompts of 64 tokens, 32 samples each; t(16) - 16 x (t(528) - t(16)) / 512, and separately the step over the
prompts, which gives the first tokens (t(1)).  *short*: a call for one token, after 2,048 tokens that the session knows
and some that it does not, with graphs of short steps and without, in turns.  *shrinking*: whole calls of 128 tokens
whose samples end at different steps, eager, then compiled, also of other families; everything after the first call
counts.  *beams*: a step of 8 beams (prompt 2,048) and of 16 x 8 (prompts of 512), compared with a step of as many
samples.  *first*: a process's first compiled call, compared with eager ones, with the import of Inductor timed
separately; *processes*: the same in fresh processes, the first of which finds torch's cache on disk empty.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch

import prefixkit
from benchmarks.runner import Row, Run, arguments
from benchmarks.shapes import FAMILIES, SHAPES
from prefixkit import Session
from prefixkit.runners.short_steps import USES, ShortSteps

PARTS = ("first", "calls", "short", "shrinking", "beams", "processes")


def prompts(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(count).integers(0, 30000, (count, length)).tolist()


def wall(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def steps(call: Callable[[int], Any], few: int, many: int, turns: int) -> Row:
    """Milliseconds of calls of ``few`` and ``many`` tokens, and of a step by their difference, after one of each."""
    first = {n: wall(lambda n=n: call(n)) for n in (many, few)}
    t = {n: 1e3 * statistics.median(wall(lambda n=n: call(n)) for _ in range(turns)) for n in (few, many)}
    step = (t[many] - t[few]) / (many - few)
    return {"first_s": round(first[many], 2), "few_ms": round(t[few], 1), "step_ms": round(step, 3)}


def cost_of_a_call(model: Any, compiled: bool, turns: int) -> Row:
    with Session(model, kv_budget="8GiB", compiled=compiled) as session:

        def call(new: int) -> Any:
            return session.generate(prompts(4, 64), n=32, max_new_tokens=new, stop_token_ids=())

        row = steps(call, 16, 528, turns)
        row["beside_ms"] = round(row["few_ms"] - 16 * row["step_ms"], 2)
        row["prefill_and_first_ms"] = steps(call, 1, 2, turns)["few_ms"]
        held = torch.cuda.memory_allocated()
        captures = sum(call(16).report.captures for _ in range(100))
        grown = torch.cuda.memory_allocated() - held
    return {"compiled": compiled, **row, "bytes_grown_in_100_calls": grown, "captures_in_100_calls": captures}


def short_prompts(model: Any, vocab: int, compiled: bool, turns: int) -> list[Row]:
    """Milliseconds of calls whose prompt steps run by a graph, and of calls that launch the same steps' kernels."""
    rng, rows = np.random.default_rng(0), list[Row]()
    known = rng.integers(0, vocab, 2048).tolist()
    launched = mock.patch.object(ShortSteps, "__call__", lambda *_: None)
    with Session(model, kv_budget="8GiB", compiled=compiled) as session:

        def call(own: int, new: int = 1) -> Any:
            prompt = known + rng.integers(0, vocab, own).tolist()
            return session.generate([prompt], max_new_tokens=new, stop_token_ids=())

        call(8, 24)  # compiles layers
        for own in (8, 32, 128, 512, 1024, 2048):
            first = [round(1e3 * wall(lambda: call(own)), 1) for _ in range(USES + 2)]  # noqa: B023
            took: dict[str, list[float]] = {"graph_ms": [], "launched_ms": []}
            for _ in range(turns):
                took["graph_ms"].append(1e3 * wall(lambda: call(own)))  # noqa: B023
                with launched:
                    took["launched_ms"].append(1e3 * wall(lambda: call(own)))  # noqa: B023
            medians = {name: round(statistics.median(times), 2) for name, times in took.items()}
            rows.append({"compiled": compiled, "own": own, **medians, "first_ms": first})
    return rows


def shrinking(model: Any, vocab: int, turns: int) -> Row:
    """Samples end at random, one in 64 tokens: batches pass through many buckets.

    The eager session ends before the compiled one begins: that one moves weights, after which the eager session would
    capture its graphs again.
    """
    took: dict[bool, list[float]] = {False: [], True: []}
    for compiled, seconds in took.items():
        with Session(model, kv_budget="8GiB", compiled=compiled) as session:
            for turn in range(turns + 1):
                params = {"n": 64, "max_new_tokens": 128, "seed": turn, "stop_token_ids": tuple(range(0, vocab, 64))}
                seconds.append(wall(lambda: session.generate(prompts(4, 64), **params)))  # noqa: B023
    names = {False: "eager", True: "compiled"}
    row: Row = {f"{names[c]}_s": round(sum(seconds[1:]) / turns, 4) for c, seconds in took.items()}
    return row | {f"{names[c]}_each_s": [round(one, 3) for one in seconds] for c, seconds in took.items()}


def beams(model: Any, count: int, length: int, turns: int) -> Row:
    """Capture the graphs of both before either is timed: a process that has captured only one replays it faster."""
    asked, fixed = prompts(count, length), {"stop_token_ids": ()}
    with Session(model, kv_budget="16GiB") as session:  # so that all run at once: searches reserve for the worst case

        def samples(new: int) -> Any:
            return session.generate(asked, n=8, max_new_tokens=new, **fixed)

        def search(new: int) -> Any:
            return session.beam_search(asked, num_beams=8, max_new_tokens=new, **fixed)

        samples(144), search(144)
        took = {each.__name__: steps(each, 16, 144, turns) for each in (samples, search)}
    ratio = round(took["search"]["step_ms"] / took["samples"]["step_ms"], 2)
    return {"beams": f"{count} x 8", "prompt": length, **took, "ratio": ratio}


def first_call(model: Any) -> Row:
    """Seconds of a process's first compiled call, after eager ones."""

    def seconds(compiled: bool) -> list[float]:
        with Session(model, kv_budget="2GiB", compiled=compiled) as session:
            fixed: Row = {"n": 32, "max_new_tokens": 16, "stop_token_ids": ()}
            return [round(wall(lambda: session.generate(prompts(4, 64), **fixed)), 3) for _ in range(2)]

    eager = seconds(False)
    imported = round(wall(lambda: importlib.import_module("torch._inductor.compile_fx")), 3)
    return {"eager_s": eager, "import_s": imported, "compiled_s": seconds(True)}


def processes(shape: str, turns: int) -> Row:
    """Seconds of first compiled calls of processes that share a cache on disk, empty for the first process."""
    rows = []
    with TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.calls", "--shapes", shape, "--parts", "first"]
        for turn in range(1 + turns):
            out = Path(cache, f"{turn}.json")
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
            subprocess.run([*command, "--out", str(out)], env=environment, check=True, stdout=subprocess.DEVNULL)
            rows.append(json.loads(out.read_text())["first"][0])
    first, *later = [row["compiled_s"][0] for row in rows]
    return {"first_s": first, "later_s": later, "import_s": [row["import_s"] for row in rows]}


def main() -> None:
    names, parts = ["Llama-3.2-1B", "SmolLM2-135M", "Llama-3.1-8B", *FAMILIES], list(PARTS)
    options = arguments(__doc__, shapes=names, parts=parts, turns=5, eager=False)
    run = Run(options)
    for name in options.shapes:
        shape = SHAPES.get(name) or FAMILIES[name]
        model = prefixkit.patch(shape.build("cuda", torch.bfloat16))
        if "first" in options.parts:
            run.add("first", {"shape": name, **first_call(model)})
        if "calls" in options.parts and name in SHAPES:
            for compiled in (False,) if options.eager else (False, True):
                run.add("calls", {"shape": name, **cost_of_a_call(model, compiled, options.turns)})
        if "short" in options.parts:
            for compiled in (False, True):
                for row in short_prompts(model, shape.vocab, compiled, options.turns):
                    run.add("short", {"shape": name, **row})
        if "shrinking" in options.parts:
            run.add("shrinking", {"shape": name, **shrinking(model, shape.vocab, options.turns)})
        if "beams" in options.parts and name in SHAPES:
            for count, length in ((1, 2048), (16, 512)):
                run.add("beams", {"shape": name, **beams(model, count, length, options.turns)})
        if "processes" in options.parts:
            run.add("processes", {"shape": name, **processes(name, options.turns)})
        del model
    run.finish("seconds")


if __name__ == "__main__":
    main()
