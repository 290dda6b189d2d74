"""The engine on one GPU, with a Llama-3.1-8B shape and random bf16 weights: ``rows`` samples of one prompt.

    python -m benchmarks.engine [--rows 64,256,1024] [--prompt 2048] [--new 128] [--out FILE]
    python -m benchmarks.engine --long 2000 [--rows 512] [--out FILE]   sequences that end and arrive: memory, captures
    python -m benchmarks.engine --full [--new 256] [--out FILE]         more samples than memory holds

The wall time of a decode step; that of its graph alone; what the host does besides waiting (in all; the median from the
tokens of one step to waiting for the next; to begin and end); by the profiler, how long the GPU had nothing to do.
``make_engine`` and ``requests`` are what ``benchmarks/compare.py`` calls in every checkout.
"""

import itertools
import statistics
import time
from typing import Any
from unittest import mock

import numpy as np
import torch

import prefixkit
from benchmarks.runner import Row, Run, arguments, replayed_ms
from benchmarks.shapes import LLAMA_8B
from prefixkit.api import make_engine
from prefixkit.engine.engine import Engine
from prefixkit.engine.request import Request
from prefixkit.models import kv_spec
from prefixkit.runners.graph import GraphDecoder
from prefixkit.sampling.params import SamplingParams

PROFILED_STEPS = 40


def requests(count: int, prompt: int, seed: int = 0, **params: Any) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [Request(i, rng.integers(0, 30000, prompt), SamplingParams(**params)) for i in range(count)]


def waits_of(engine: Engine, asked: list[Request]) -> list[tuple[float, float]]:
    """When the host began to wait for the tokens of each step of a run, and when they were there, in seconds."""
    decoder, waits = graph_decoder(engine), []
    read = decoder.read

    def timed() -> Any:
        began = time.perf_counter()
        decoder._arrays.ring.ready[decoder._unread[0][0]].synchronize()  # type: ignore[union-attr]
        waits.append((began, time.perf_counter()))
        return read()

    with mock.patch.object(decoder, "read", timed):
        engine.run(asked)
    return waits


def graph_decoder(engine: Engine) -> GraphDecoder:
    assert isinstance(engine.decoder, GraphDecoder)
    return engine.decoder


def decode(model: Any, rows: int, prompt: int, new: int, sampling: dict[str, Any], compiled: bool) -> Row:
    """One prompt, ``rows`` samples."""
    asked = requests(1, prompt, n=rows, max_new_tokens=new, **sampling)
    engine = make_engine(model, asked, compiled=compiled)
    engine.run(asked)  # captures
    before = vars(engine.report).copy()
    waits, report = waits_of(engine, asked), engine.report
    names = "decode_steps", "seconds_in_decode", "seconds"
    steps, seconds, total = (getattr(report, name) - before[name] for name in names)
    between = [began - there for (_, there), (began, _) in itertools.pairwise(waits)]
    working = seconds - sum(there - began for began, there in waits)
    # The last graph by itself; its rows have ended, so trees do not grow.
    decoder = graph_decoder(engine)
    replays = replayed_ms(decoder._graphs[decoder._running], 20)
    return {
        "rows": rows,
        "prompt": prompt,
        "new": new,
        "sampling": sampling,
        "compiled": compiled,
        "tokens_per_second": round(rows * new / total),
        "decode_step_ms": round(1e3 * seconds / steps, 3),
        "replay_ms": round(statistics.fmean(replays), 3),
        "host_ms": round(1e3 * working / steps, 3),
        "host_step_ms": round(1e3 * statistics.median(between), 3),
        "host_begin_end_ms": round(1e3 * (working - sum(between)), 1),
        "prefill_and_first_ms": round(1e3 * (total - seconds), 1),
        "capture_s": round(report.seconds_capturing, 2),
        "graph_mib": round(report.graph_bytes / 2**20),
        "idle": round(idle(engine, asked), 4),
    }


def idle(engine: Engine, asked: list[Request]) -> float:
    """The part of a decode in which no kernel and no copy ran, by the profiler, over steps in its middle."""
    decoder, taken = graph_decoder(engine), itertools.count(1)
    step = decoder.step
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def counted() -> None:
        number = next(taken)
        if number == 20:
            profiler.start()
        step()
        if number == 20 + PROFILED_STEPS:
            torch.cuda.synchronize()
            profiler.stop()

    with mock.patch.object(decoder, "step", counted):
        engine.run(asked)
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type.name == "CUDA")
    busy, at = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(at, begin))
        at = max(at, end)
    return 1 - busy / (at - spans[0][0])


def long_run(model: Any, steps: int, rows: int, prompt: int) -> Row:
    """Sequences of random length end and others arrive, for so many steps: what grows, and what is captured again."""
    stops = tuple(range(0, LLAMA_8B.vocab, 150))
    sampling = {"temperature": 1.0, "stop_token_ids": stops, "max_new_tokens": 600, "n": rows // 4}
    need = rows * (600 // 16 + 1) * 16 + 8 * prompt
    engine = make_engine(model, requests(10, prompt, **sampling), kv_budget=need * kv_spec(model).bytes_per_token)
    held: list[Row] = []
    while engine.report.steps < steps:
        torch.cuda.reset_peak_memory_stats()
        engine.run(requests(10, prompt, seed=len(held), **sampling))
        held.append({"steps": engine.report.steps, "captures": engine.report.captures, **memory_mib()})
    engine.tree.check()
    report = engine.report
    return {
        **{name: getattr(report, name) for name in ("steps", "decode_steps", "samples", "captures")},
        "seconds": round(report.seconds, 1),
        "tokens_per_second": round(report.tokens_per_second),
        "rounds": held,
        "pages_back": engine.tree.allocator.free == engine.tree.allocator.num_pages,
    }


def full_run(model: Any, prompt: int, new: int) -> Row:
    """More samples than memory holds, with prefixkit's own pool: how full the GPU gets, and that none is lost."""
    asked = requests(2, prompt, n=2560, max_new_tokens=new, temperature=1.0)
    engine = make_engine(model, asked)
    left: list[int] = []
    engine.on_step = lambda tokens: left.append(torch.cuda.mem_get_info()[0])
    samples = engine.run(asked)
    pool, report = engine.tree.allocator.num_pages, engine.report
    pool_bytes = pool * engine.tree.page_size * engine.pool.spec.bytes_per_token
    return {
        "samples": len(samples),
        "complete": all(len(sample.tokens) == new for sample in samples),
        "steps": report.steps,
        "tokens_per_second": round(report.tokens_per_second),
        "pool_gib": round(pool_bytes / 2**30, 1),
        "pool_used": round(report.kv_bytes_held_peak / pool_bytes, 3),
        "least_free_gib": round(min(left) / 2**30, 2),
        **memory_mib(),
        "pages_back": engine.tree.allocator.free == pool,
    }


def memory_mib() -> dict[str, int]:
    most = {"most_allocated_mib": torch.cuda.max_memory_allocated() >> 20}
    now = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {"allocated_mib": now[0] >> 20, **most, "reserved_mib": now[1] >> 20}


def main() -> None:
    sizes: Row = {"rows": [64, 256, 1024], "prompt": 2048, "new": 128, "layers": LLAMA_8B.layers}
    long = {"type": int, "default": 0, "help": "so many steps with sequences that end and arrive"}
    options = arguments(__doc__, **sizes, long=long, full=False)
    run = Run(options)
    model = prefixkit.patch(LLAMA_8B.build("cuda", torch.bfloat16, layers=options.layers))
    if options.long:
        run.result["long"] = long_run(model, options.long, options.rows[0], options.prompt)
    if options.full:
        run.result["full"] = full_run(model, options.prompt, options.new)
    if not (options.long or options.full):
        plain, filtered = {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
        for rows, way in itertools.product(options.rows, ((plain, False), (plain, True), (filtered, True))):
            run.add("decode", decode(model, rows, options.prompt, options.new, *way))
    run.finish("long", "full", "seconds")


if __name__ == "__main__":
    main()
