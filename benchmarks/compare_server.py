"""One side of ``compare.py``: prepares and times cases with the checkout that PYTHONPATH names.

Of a checkout it uses only ``prefixkit.patch`` and the names that the functions below import from ``benchmarks``; clocks
and shapes are those of this folder.  It receives ``(what, case)`` from a pipe, and answers ``(value, error)``.
"""

import inspect
import os
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import runner
import shapes
import torch

CHECKOUT = Path(os.environ["PYTHONPATH"])
sys.path.pop(0)  # this folder, which is not needed any more
# Another checkout may be on the path, and a package there would hide a namespace of the same name here.
sys.modules["benchmarks"] = types.ModuleType("benchmarks")
sys.modules["benchmarks"].__path__ = [str(CHECKOUT / "benchmarks")]

Time = Callable[[], float]


def cpu_seconds(run: Callable[[], object], repeats: int = 1) -> float:
    """The least CPU time of this process, since a busy machine disturbs CPU time less than wall time."""
    return min(runner.wall_seconds(run, repeats, clock=time.process_time))


def engine_of(name: str, prompt: int, rows: int, new: int) -> tuple[Any, list[Any]]:
    """An engine, and its request for ``rows`` samples of one prompt."""
    from benchmarks.engine import make_engine, requests

    asked = requests(1, prompt, n=rows, max_new_tokens=new, temperature=1.0)
    return make_engine(model(name), asked), asked


@cache
def pool() -> Any:
    """Pages that all workloads share."""
    from benchmarks.tree_attention.inputs import Pool

    return Pool()


@lru_cache(1)
def model(name: str) -> Any:
    """A patched model with random weights: a large one on the GPU, or one of the small ones on the CPU."""
    import prefixkit

    large = name in shapes.FAMILIES or name.startswith("Llama")
    where = ("cuda", torch.bfloat16) if large else ("cpu", torch.float32)
    return prefixkit.patch((shapes.SHAPES.get(name) or shapes.FAMILIES[name]).build(*where))


def prompt_of(length: int) -> list[int]:
    """A prompt that differs at each call."""
    return np.random.default_rng().integers(5, 300, length).tolist()


def attention(case: runner.Row) -> Time:
    """Microseconds of one layer's attention."""
    from benchmarks.tree_attention.inputs import make, ours
    from benchmarks.tree_attention.workloads import workload

    inputs = make(workload(case["workload"], *case["heads"]), pool())
    replay = runner.Replay(lambda index: ours(inputs, index), inputs.sets)
    return lambda: replay.us(3)


def engine(case: runner.Row) -> Time:
    """Milliseconds of a decode step of ``rows`` samples of one prompt, graphs captured before."""
    made, asked = engine_of("Llama-3.1-8B", 2048, case["rows"], 64)
    made.run(asked)

    def timed_run() -> float:
        steps, seconds = made.report.decode_steps, made.report.seconds_in_decode
        made.run(asked)
        return 1e3 * (made.report.seconds_in_decode - seconds) / (made.report.decode_steps - steps)

    return timed_run


def sampling(case: runner.Row) -> Time:
    """Microseconds a token of ``rows`` samples of one prompt, prefill included."""
    made, asked = engine_of("small", case["prompt"], case["rows"], case["new"])
    return lambda: 1e6 * cpu_seconds(lambda: made.run(asked)) / (case["rows"] * case["new"])


def tree(case: runner.Row) -> Time:
    """Milliseconds of inserting sequences that differ in their last 128 tokens."""
    from benchmarks.tree import insert_all, with_tails

    sequences = with_tails(np.random.default_rng(0), case["sequences"], case["tokens"], 128)
    return lambda: 1e3 * cpu_seconds(lambda: insert_all(sequences, 16), 3)


def admission(case: runner.Row) -> Time:
    """Milliseconds to make an engine for the prompts, and to queue, admit and retire them all; no model runs."""
    from benchmarks.engine import make_engine, requests
    from benchmarks.tree import with_tails

    with suppress(ImportError):  # in older checkouts
        from prefixkit.engine.call import Call

    rng = np.random.default_rng(0)
    prompts = [prompt for _ in range(case["prompts"] // 50) for prompt in with_tails(rng, 50, 110, 40)]
    rng.shuffle(prompts)
    asked = requests(len(prompts), 1, max_new_tokens=16)
    asked = [replace(request, tokens=prompt) for request, prompt in zip(asked, prompts, strict=True)]

    def admit() -> None:
        made = make_engine(model("words"), asked)  # in older checkouts the scheduler refers to it weakly
        scheduler = made.loop(Call()).scheduler if hasattr(made, "loop") else made.scheduler
        scheduler.submit(asked)
        scheduler.admit(*([0] if inspect.signature(scheduler.admit).parameters else []))
        # Older checkouts call it ``groups``.
        in_flight = list(scheduler.in_flight if hasattr(scheduler, "in_flight") else scheduler.groups)
        assert len(in_flight) == len(asked)
        for state in in_flight:
            scheduler.retire(state)

    return lambda: 1e3 * cpu_seconds(admit)


def generate(case: runner.Row) -> Time:
    """Milliseconds of a whole ``model.generate()``: ``rows`` samples of a prompt that was not seen before."""
    asked = {"max_new_tokens": case["new"], "min_new_tokens": case["new"], "do_sample": True}
    asked |= {"num_return_sequences": case["rows"], "pad_token_id": 0}

    def call() -> None:
        model(case["shape"]).generate(torch.tensor([prompt_of(case["prompt"])]), **asked)

    return lambda: 1e3 * cpu_seconds(call)


def session(case: runner.Row) -> Time:
    """Milliseconds of a whole call of a session for ``new`` tokens after ``known`` ones whose KV it holds."""
    import prefixkit

    made, known = prefixkit.Session(model(case["shape"]), kv_budget="64MiB"), prompt_of(case["known"])

    def call() -> None:
        for _ in range(5):
            made.generate([known + prompt_of(4)], n=1, max_new_tokens=case["new"], stop_token_ids=())

    return lambda: 1e3 * cpu_seconds(call) / 5


def calls(case: runner.Row) -> Time:
    """Milliseconds of a whole call after a prompt that was not seen before, by a session or the model's generate()."""
    import prefixkit

    on_gpu, rows, new = torch.cuda.is_available(), case["rows"], case["new"]
    made = model(shapes.LLAMA_8B.name if on_gpu else "small")
    opened = prefixkit.Session(made, kv_budget="8GiB" if on_gpu else "64MiB")
    options = {"max_new_tokens": new, "stop_token_ids": ()}
    plain = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "num_return_sequences": rows}

    def call() -> None:
        prompt = prompt_of(case["prompt"])
        if case["name"] == "samples":
            opened.generate([prompt], n=rows, temperature=1.0, **options)
        elif case["name"] == "beams":
            opened.beam_search([prompt], num_beams=rows, **options)
        elif case["name"] == "scores":
            opened.score(prompt, [prompt_of(new) for _ in range(rows)])
        else:
            made.generate(torch.tensor([prompt], device=made.device), pad_token_id=0, **plain)

    def timed_call() -> float:
        if not on_gpu:
            return cpu_seconds(call)
        torch.cuda.synchronize()
        return runner.wall_seconds(lambda: (call(), torch.cuda.synchronize()), 1)[0]

    return lambda: 1e3 * timed_call()


def whole(case: runner.Row) -> Time:
    """Seconds of a whole call of a session with compiled layers, as ``whole_calls.py`` makes it."""
    import prefixkit

    calls, on_gpu = shapes.CALLS[case["call"]], torch.cuda.is_available()
    session = prefixkit.Session(model(case["shape"]), kv_budget=case["kv_budget"], compiled=on_gpu)
    vocab, seed = (shapes.SHAPES.get(case["shape"]) or shapes.FAMILIES[case["shape"]]).vocab, iter(range(10**9))

    def call() -> None:
        fixed = {"n": calls.samples, "max_new_tokens": calls.new, "stop_token_ids": (), "top_p": 0.95}
        session.generate(calls.random_prompts(next(seed), vocab), **fixed)

    return lambda: runner.wall_seconds(call)[0]


CASES = {"attention": attention, "engine": engine, "sampling": sampling, "tree": tree, "admission": admission}
CASES |= {"generate": generate, "session": session, "calls": calls, "whole": whole}


def main() -> None:
    torch.set_num_threads(1)
    pipe, ready = Connection(int(sys.argv[1])), None
    for what, case in iter(pipe.recv, None):
        try:
            if what == "where":
                import prefixkit

                pipe.send((str(Path(prefixkit.__file__).parents[1]), None))
                continue
            if what == "prepare":
                ready = None  # freed before the next one is made, or both would have to fit
                if case["kind"] != "attention":
                    pool.cache_clear()
                runner.free_memory()
                ready = CASES[case["kind"]](case)
            pipe.send((ready(), None))  # the first one warms up
        except Exception as error:
            pipe.send((None, runner.failure(error)))


if __name__ == "__main__":
    main()
