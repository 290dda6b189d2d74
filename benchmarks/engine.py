"""A Llama-3.1-8B shape with random bf16 weights on one GPU: ``rows`` samples of one prompt in the engine.

    python -m benchmarks.engine [--rows 64,256,1024] [--prompt 2048] [--new 128] [--out FILE]
    python -m benchmarks.engine --long 2000 | --full [--rows 512] [--new 256]    arrivals; a full memory
    python -m benchmarks.engine --step           one step's graph: layers compiled or not, with and without attention

``make_engine`` and ``requests`` are what ``benchmarks/compare.py`` calls in every checkout.
"""

import dataclasses
import itertools
import statistics
import time
from typing import Any
from unittest import mock

import numpy as np
import torch

import prefixkit
from benchmarks.runner import Row, Run, arguments, captured, free_memory, replayed_ms, spread
from benchmarks.shapes import LLAMA_8B
from benchmarks.tree_attention.inputs import planner_for
from benchmarks.tree_attention.workloads import PAGE, Workload, workload
from prefixkit.attention.planner import Planner
from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import Step, build_step
from prefixkit.engine.engine import Engine
from prefixkit.engine.request import Request
from prefixkit.kv.kv_pool import KVPool, KVSpec
from prefixkit.models import ModelRunner, kv_spec
from prefixkit.ops import library
from prefixkit.ops.backend import Backend, backend_for
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from prefixkit.testing.integrity import check_tree

PREFIX, SUFFIX, REPLAYS, WARM = 2048, 64, 15, 3  # of --step: shared and own tokens, replays, and replays to warm up


def requests(count: int, prompt: int, seed: int = 0, **params: Any) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [Request(i, rng.integers(0, 30000, prompt), SamplingParams(**params)) for i in range(count)]


def waits_of(engine: Engine, asked: list[Request]) -> list[tuple[float, float]]:
    """For each step of a run, when the host began to wait for its tokens, and when they arrived, in seconds."""
    read, waits = engine.runner.read, []

    def timed() -> Any:
        began, sampled = time.perf_counter(), read()
        waits.append((began, time.perf_counter()))
        return sampled

    with mock.patch.object(engine.runner, "read", timed):
        engine.run(asked)
    return waits


def decode(model: Any, rows: int, prompt: int, new: int, sampling: dict[str, Any], compiled: bool) -> Row:
    """A decode step's wall time, its graph's alone, the host's work apart from waiting, and the GPU's idle time."""
    asked = requests(1, prompt, n=rows, max_new_tokens=new, **sampling)
    engine = make_engine(model, asked, compiled=compiled)
    engine.run(asked)  # captures
    before = vars(engine.report).copy()
    waits, report = waits_of(engine, asked), engine.report
    names = "decode_steps", "seconds_in_decode", "seconds"
    steps, seconds, total = (getattr(report, name) - before[name] for name in names)
    between = [began - there for (_, there), (began, _) in itertools.pairwise(waits)]
    working = seconds - sum(there - began for began, there in waits)
    # Replay the last graph alone; its rows have ended, so trees do not grow.
    runner: Any = engine.runner
    replays = replayed_ms(runner._graphs[runner._bucket, runner._output, runner._variant].graph, 20)
    row: Row = {"rows": rows, "prompt": prompt, "new": new, "sampling": sampling, "compiled": compiled}
    row |= {"tokens_per_second": round(rows * new / total), "decode_step_ms": round(1e3 * seconds / steps, 3)}
    row |= {"replay_ms": round(statistics.fmean(replays), 3), "host_ms": round(1e3 * working / steps, 3)}
    row["host_step_ms"] = round(1e3 * statistics.median(between), 3)
    row["host_begin_end_ms"] = round(1e3 * (working - sum(between)), 1)
    row["prefill_and_first_ms"] = round(1e3 * (total - seconds), 1)
    row |= {"capture_s": round(report.seconds_capturing, 2), "graph_mib": round(report.graph_bytes / 2**20)}
    return row | {"idle": round(idle(engine, asked), 4)}


def idle(engine: Engine, asked: list[Request]) -> float:
    """The share of time without kernels and copies, by the profiler, over 40 steps in the middle of a decode."""
    taken, step = itertools.count(1), engine.runner.repeat
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def counted() -> None:
        number = next(taken)
        if number == 20:
            profiler.start()
        step()
        if number == 60:
            torch.cuda.synchronize()
            profiler.stop()

    with mock.patch.object(engine.runner, "repeat", counted):
        engine.run(asked)
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type.name == "CUDA")
    busy, at = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(at, begin))
        at = max(at, end)
    return 1 - busy / (at - spans[0][0])


def long_run(model: Any, steps: int, rows: int, prompt: int) -> Row:
    """Sequences of random length end and others arrive, step after step: memory growth, and graphs captured again."""
    stops = tuple(range(0, LLAMA_8B.vocab, 150))
    sampling = {"temperature": 1.0, "stop_token_ids": stops, "max_new_tokens": 600, "n": rows // 4}
    need = rows * (600 // 16 + 1) * 16 + 8 * prompt
    engine = make_engine(model, requests(10, prompt, **sampling), kv_budget=need * kv_spec(model).bytes_per_token)
    held: list[Row] = []
    while engine.report.steps < steps:
        torch.cuda.reset_peak_memory_stats()
        engine.run(requests(10, prompt, seed=len(held), **sampling))
        held.append({"steps": engine.report.steps, "captures": engine.report.captures, **memory_mib()})
    check_tree(engine.store.tree)
    report, pages = engine.report, engine.store.tree.allocator
    row: Row = {name: getattr(report, name) for name in ("steps", "decode_steps", "samples", "captures")}
    row |= {"seconds": round(report.seconds, 1), "tokens_per_second": round(report.tokens_per_second)}
    return row | {"rounds": held, "pages_back": pages.free == pages.num_pages}


def full_run(model: Any, prompt: int, new: int) -> Row:
    """More samples than memory holds, with prefixkit's own pool: the GPU's memory use; checks that none is lost."""
    asked = requests(2, prompt, n=2560, max_new_tokens=new, temperature=1.0)
    engine = make_engine(model, asked)
    left: list[int] = []
    engine.options["on_step"] = lambda tokens: left.append(torch.cuda.mem_get_info()[0])
    samples = engine.run(asked)
    pool, report = engine.store.tree.allocator.num_pages, engine.report
    pool_bytes = pool * engine.store.tree.page_size * engine.store.pool.spec.bytes_per_token
    row: Row = {"samples": len(samples), "complete": all(len(sample.tokens) == new for sample in samples)}
    row |= {"steps": report.steps, "tokens_per_second": round(report.tokens_per_second)}
    row |= {"pool_gib": round(pool_bytes / 2**30, 1), "pool_used": round(report.kv_bytes_held_peak / pool_bytes, 3)}
    row |= {"least_free_gib": round(min(left) / 2**30, 2), **memory_mib()}
    return row | {"pages_back": engine.store.tree.allocator.free == pool}


def memory_mib() -> dict[str, int]:
    parts = {"allocated": "memory_allocated", "most_allocated": "max_memory_allocated", "reserved": "memory_reserved"}
    return {f"{name}_mib": getattr(torch.cuda, of)() >> 20 for name, of in parts.items()}


def without_attention(device: torch.device) -> Backend:
    """A backend whose tree_attention returns at once, but which appends KV: a lower bound for faster attention."""

    def returns_at_once(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    return dataclasses.replace(backend_for(device), tree_attention=returns_at_once)


def step_ms(runner: ModelRunner, step: Step) -> dict[str, float]:
    """Median and spread of replays of one captured step."""
    graph = captured(lambda: runner(step), torch.cuda.Stream())
    times = spread(replayed_ms(graph, REPLAYS + WARM)[WARM:])
    del graph
    free_memory()
    return {"ms": times["median"], "least_ms": times["best"], "most_ms": times["worst"]}


def random_pool(spec: KVSpec, pages: int) -> KVPool:
    """A pool whose pages hold random numbers; in e4m3 from 0.5 to 2."""
    pool = KVPool(spec, pages, PAGE)
    for layer in range(len(spec.layers)):
        for tensor in pool.pages(layer):
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8).random_(0x30, 0x41)
            else:
                tensor.normal_()
    return pool


def decode_step(work: Workload, planner: Planner, vocab: int, device: str = "cuda") -> Step:
    """A step that computes the last token of each leaf of a workload's tree."""
    count = work.queries.num_rows
    tokens = np.random.default_rng(count).integers(0, vocab, count)
    computed = work.snapshot.computed.copy()
    computed[work.queries.node] = work.queries.begin  # a decode step appends its tokens
    tree = StepTree(dataclasses.replace(work.snapshot, computed=computed), work.queries)
    return build_step(tree, tokens, np.arange(count), planner, torch.device(device))


def measure_step(run: Run, model: Any, batches: list[int]) -> None:
    """A decode step of sequences that share a prefix, with its layers eager and through torch.compile."""
    spec = kv_spec(model)
    pool = random_pool(spec, PREFIX // PAGE + max(batches) * -(-SUFFIX // PAGE))
    planner = planner_for(LLAMA_8B.heads, LLAMA_8B.kv_heads, LLAMA_8B.head_dim, spec.device, spec.dtype)
    runners = {"eager": ModelRunner(model, pool), "compiled": ModelRunner(model, pool, compiled=True)}
    layers: Any = runners["compiled"].compiled
    for batch in batches:
        work = workload(f"2L b{batch} p{PREFIX} s{SUFFIX}", LLAMA_8B.heads, LLAMA_8B.kv_heads)
        step = decode_step(work, planner, LLAMA_8B.vocab)
        for name, runner in runners.items():
            graphs, seconds, began = layers.graphs, layers.seconds, time.perf_counter()
            runner(step)
            torch.cuda.synchronize()
            row: Row = {"batch": batch, "modules": name, "first_step_s": time.perf_counter() - began}
            if name == "compiled":
                made = {"graphs": layers.graphs - graphs, "compile_s": layers.seconds - seconds}
                row |= made | {"fallback": layers.reason}
            for attention in (True, False):
                with mock.patch.object(library, "backend_for", backend_for if attention else without_attention):
                    row = row | {"attention": attention, **step_ms(runner, step)}
                text = f"{'with' if attention else 'without':8s} attention {row['ms']:7.2f} ms"
                run.add("rows", row, f"batch {batch:5d}  {name:9s} {text}")


def main() -> None:
    sizes: Row = {"rows": [64, 256, 1024], "prompt": 2048, "new": 128, "layers": LLAMA_8B.layers}
    long = {"type": int, "default": 0, "help": "so many steps with sequences that end and arrive"}
    options = arguments(__doc__, **sizes, long=long, full=False, step=False)
    run = Run(options)
    model = prefixkit.patch(LLAMA_8B.build("cuda", torch.bfloat16, layers=options.layers))
    if options.long:
        run.result["long"] = long_run(model, options.long, options.rows[0], options.prompt)
    if options.full:
        run.result["full"] = full_run(model, options.prompt, options.new)
    if options.step:
        run.result["layers"] = options.layers
        measure_step(run, model, options.rows)
        run.result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if not (options.long or options.full or options.step):
        plain, filtered = {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
        for rows, way in itertools.product(options.rows, ((plain, False), (plain, True), (filtered, True))):
            run.add("decode", decode(model, rows, options.prompt, options.new, *way))
    run.finish("long", "full", "peak_gib", "seconds")


if __name__ == "__main__":
    main()
