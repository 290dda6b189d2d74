"""The experiments: (a) throughput, (b) one layer, (c) a long document, (d) two levels of sharing, (n) parallel generation.

Each gives jobs for a model shape, in order of priority; a job makes one row of results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.hydragen.cases import Case, mean, two_level
from benchmarks.hydragen.methods import METHODS, DoesNotFit
from benchmarks.hydragen.report import SMALLER_FLASH
from benchmarks.hydragen.step import Rig
from benchmarks.runner import OUT_OF_TIME, Row, failure, input_sets, replay_us, wall_seconds
from benchmarks.tree_attention.rivals import MOST_EXPANDED_BYTES
from prefixkit.api import make_engine
from prefixkit.engine.report import Report
from prefixkit.engine.request import Request
from prefixkit.sampling.params import SamplingParams

# What a step may take beside the compiled ceiling: so much of attention's floor, and so much of all.
FLOORS, SLACK = 1.35, 0.03
# Part of the memory that is free which KV may take.
MEMORY_SHARE = 0.85
# Steps of stock transformers that are timed, after as many as warm it up.
STOCK_STEPS, STOCK_WARM = 12, 2
QUESTION_TOKENS = 14

# Shape: priority: (batch, prefix, new tokens); both axes of the paper through (middle batch, 2K).
THROUGHPUT: dict[str, dict[int, list[tuple[int, int, int]]]] = {
    "CodeLlama-7B": {
        1: [(256, 2048, 128), (32, 2048, 128), (512, 16384, 128), (1024, 2048, 128)],
        2: [(512, 1024, 128), (512, 4096, 128), (64, 2048, 128), (512, 2048, 256), (512, 2048, 128)],
        3: [(128, 2048, 128), (512, 8192, 128), (2048, 2048, 128)],
    },
    "Llama-3.1-8B": {
        1: [(256, 2048, 128), (1024, 2048, 128), (1024, 16384, 128), (4096, 2048, 128)],
        2: [(32, 2048, 128), (64, 2048, 128), (1024, 1024, 128), (1024, 4096, 128), (1024, 2048, 256)],
        3: [(1024, 8192, 128), (2048, 2048, 128), (4096, 16384, 128)],
    },
    "CodeLlama-13B": {
        2: [(256, 2048, 128), (32, 2048, 128), (512, 16384, 128), (512, 2048, 128)],
        3: [(512, 1024, 128), (512, 4096, 128), (256, 2048, 256), (1024, 2048, 128)],
    },
    "tiny": {1: [(8, 64, 8)], 2: [(16, 32, 4)]},
}
# Shape: batch, prefix, new tokens.
ENGINE = {
    "CodeLlama-7B": [(256, 2048, 128)],
    "Llama-3.1-8B": [(64, 2048, 128), (256, 2048, 128), (1024, 2048, 128), (4096, 2048, 128)],
    "tiny": [(4, 32, 6)],
}
# Shape: batches of generate and of expand, tokens of the prompt; the model where both of stock's ways fit.
STOCK = {"Llama-3.1-8B": (64, 256, 2048), "tiny": (2, 4, 16)}
# Shape: its attention heads are used; batches, prefixes, suffixes.
BATCHES, PREFIXES, SUFFIXES = (64, 256, 1024), (1024, 2048, 4096, 8192, 16384), (16, 128, 512)
GRIDS = {
    "CodeLlama-7B": (BATCHES, PREFIXES, SUFFIXES),
    "8/1 heads": (BATCHES, PREFIXES, SUFFIXES),
    "tiny": ((2, 4), (16, 32), (128,)),
}
# Shape: tokens of the document, of an answer; questions: with their priority.
DOCUMENTS = {"Yi-6B": (19_947, 128, {64: 2, 128: 3, 256: 1, 512: 3, 1024: 1}), "tiny": (199, 6, {3: 1})}
# Shape: (problems, samples of each, few-shot tokens, tokens of a problem, new tokens, priority).
PROBLEMS = {
    "Llama-3.1-8B": [(8, 128, 2400, 400, 256, 1), (2, 128, 2400, 400, 256, 3), (16, 128, 2400, 400, 256, 2)],
    "CodeLlama-7B": [(4, 128, 2400, 400, 256, 1), (2, 128, 2400, 400, 256, 2)],
    "tiny": [(2, 4, 48, 24, 8, 1)],
}
# Shape: requests at a time, tokens of each prompt, new tokens; samples of each: with their priority; those of the engine.
PARALLEL = {
    "Llama-3.1-8B": (16, 1024, 128, {1: 1, 2: 2, 4: 2, 8: 1, 16: 2, 32: 2, 64: 1}, (8, 64)),
    "tiny": (2, 32, 8, {1: 1, 2: 1}, (2,)),
}


@dataclass(frozen=True)
class Job:
    """One row of results.

    Attributes:
        experiment: Its letter.
        shape: Name of the model shape.
        name: What the row is of.
        priority: 1 comes first; ``--quick`` does only 1.
        seconds: About how long it takes on an H200: decides how time is shared between model shapes.
        run: Does it.
    """

    experiment: str
    shape: str
    name: str
    priority: int
    seconds: float
    run: Callable[[Rig], Row] = field(repr=False)


def jobs(letter: str, shapes: list[str]) -> list[Job]:
    """Those of an experiment."""
    return [Job(letter, shape, *rest) for shape in shapes for rest in LETTERS[letter](shape)]


def run_jobs(
    jobs: list[Job],
    rig_of: Callable[[str], Rig],
    seconds: float,
    done: Callable[[Job, Row], None],
    begin_shape: Callable[[Rig], None] = lambda rig: None,
) -> None:
    """Do the jobs, shape after shape so that one model is in memory, each shape within its share of the time.

    A shape's share is by what its jobs are expected to take; what it leaves goes to those after it.  A job that does not begin
    in time gives a row that says so.
    """
    end, shapes = time.monotonic() + seconds, list(dict.fromkeys(job.shape for job in jobs))
    for index, shape in enumerate(shapes):
        of_shape = sorted((job for job in jobs if job.shape == shape), key=lambda job: job.priority)
        waiting = sum(job.seconds for job in jobs if job.shape in shapes[index:])
        share = sum(job.seconds for job in of_shape) / max(waiting, 1e-9)
        mine = time.monotonic() + (end - time.monotonic()) * share
        rig = rig_of(shape) if mine > time.monotonic() else None
        try:
            if rig is not None:
                begin_shape(rig)
            for job in of_shape:
                began = time.monotonic()
                row = _attempt(job, rig) if rig is not None and mine > began else {"skipped": OUT_OF_TIME}
                done(job, row | {"seconds": round(time.monotonic() - began, 2)})
        finally:
            if rig is not None:
                rig.close()


def _attempt(job: Job, rig: Rig) -> Row:
    try:
        return job.run(rig)
    except Exception as error:  # one job's failure does not keep the others from running
        return {"skipped": failure(error, most=300)}


# Name, priority, seconds, and what makes the row.
Rest = tuple[str, int, float, Callable[[Rig], Row]]


def _throughput(shape: str) -> Iterator[Rest]:
    """(a) Decoding: tokens per second of batches that share a prefix, over batch, prefix and new tokens."""
    for priority, cases in THROUGHPUT.get(shape, {}).items():
        for batch, prefix, new in cases:
            yield f"b{batch} p{prefix} n{new}", priority, 8.0, partial(throughput_row, two_level(batch, prefix, new))
    for batch, prefix, new in ENGINE.get(shape, ()):
        yield f"engine b{batch} p{prefix} n{new}", 1, 15.0, partial(_engine_row, batch, prefix, new)
    if shape in STOCK:
        first, second, prompt = STOCK[shape]
        yield f"generate b{first} p{prompt}", 1, 6.0, partial(_generate, first, prompt)
        yield f"expand b{second} p{prompt}", 1, 8.0, partial(_expand, second, prompt)


def _grids(shape: str) -> Iterator[Rest]:
    """(b) One layer's attention: speed-up over flash without sharing, over batch, prefix and suffix."""
    for suffix in GRIDS.get(shape, ((), (), ()))[2]:
        yield f"grid s{suffix}", 2 if suffix != 128 else 1, 10.0, partial(_grid, suffix)


def _documents(shape: str) -> Iterator[Rest]:
    """(c) Questions about one long document: the document is shared, each question has its own short suffix."""
    length, new, counts = DOCUMENTS.get(shape, (0, 0, {}))
    for count, priority in counts.items():
        yield f"{count} questions", priority, 12.0, partial(_document, length, new, count)


def _problems(shape: str) -> Iterator[Rest]:
    """(d) Two levels of sharing: few-shot examples above problems above samples, as in competitive programming."""
    for problems, samples, shots, problem, new, priority in PROBLEMS.get(shape, ()):
        case = Case(((1, shots), (problems, problem)), problems * samples, new)
        yield f"{problems} problems x {samples} samples", priority, 9.0, partial(_problem, case)


def _parallel(shape: str) -> Iterator[Rest]:
    """(n) Parallel generation: latency between tokens when each of several requests asks for n samples, sharing on and off."""
    requests, prompt, new, samples, engine = PARALLEL.get(shape, (0, 0, 0, {}, ()))
    for n, priority in samples.items():
        yield f"n={n}", priority, 5.0, partial(_samples, Case(((requests, prompt),), requests * n, new), n)
    for n in engine:
        yield f"engine n={n}", 2, 8.0, partial(_engine_latency, requests, prompt, new, n)


LETTERS = {"a": _throughput, "b": _grids, "c": _documents, "d": _problems, "n": _parallel}


def throughput_row(case: Case, rig: Rig) -> Row:
    """Where flash does not fit, also what it reaches at the largest batch that does, a power of two below."""
    row = step_row(case, rig, ("flash", "hydragen", "ours"), compiled=("ours", "hydragen"))
    if "step_ms" not in row["methods"]["flash"]:
        batch = case.batch
        while batch > 1 and not rig.fits("flash", replace(case, batch=batch)):
            batch //= 2
        smaller = replace(case, batch=batch)
        if smaller not in rig.smaller:
            rig.smaller[smaller] = rig.measure("flash", rig.state(smaller)) | {"batch": batch}
        row["methods"][SMALLER_FLASH] = rig.smaller[smaller]
    return row


def step_row(case: Case, rig: Rig, methods: tuple[str, ...], compiled: tuple[str, ...] = ()) -> Row:
    """A case with every method: in the model's own modules, and where they are compiled."""
    state = rig.state(case)
    measured: dict[str, Row] = {"none": rig.ceiling(state, False)}
    if compiled:
        measured["none, compiled"] = rig.ceiling(state, True)
    for method in methods:
        measured[method] = rig.measure(method, state)
    for method in compiled:
        measured[f"{method}, compiled"] = rig.measure(method, state, compiled=True)
    row = case.row("step", rig.shape) | {"methods": measured}
    if ceiling := measured.get("none, compiled", {}).get("step_ms"):
        floor = mean({new: case.floor_ms(rig.shape, new) for new in case.lengths})
        row["aim_ms"] = round((ceiling + FLOORS * floor) * (1 + SLACK), 4)
    return row


def _grid(suffix: int, rig: Rig) -> Row:
    batches, prefixes, _ = GRIDS[rig.shape.name]
    one, points = replace(rig.shape, layers=1), []
    for case in (two_level(batch, prefix, suffix) for prefix in prefixes for batch in batches):
        point = {"batch": case.batch, "prefix": case.levels[0][1]}
        point["floor_us"] = round(case.floor_ms(one, suffix) * 1e3, 2)
        points.append(point | {name: _layer_us(rig, name, case) for name in ("flash", "hydragen", "ours")})
    return {"kind": "grid", "suffix": suffix, "heads": [rig.shape.heads, rig.shape.kv_heads], "points": points}


def _layer_us(rig: Rig, method: str, case: Case) -> float | str:
    """Microseconds of one layer.  Where KV held by each sequence is too large, fewer sequences, and scaled."""
    bytes_held = METHODS[method].kv_bytes(case, rig.shape.bytes_per_token // rig.shape.layers)
    if method == "flash" and bytes_held > MOST_EXPANDED_BYTES and case.batch > 1:
        fewer = case.batch // 2
        smaller = _layer_us(rig, method, replace(case, batch=fewer))
        return smaller if isinstance(smaller, str) else round(smaller * case.batch / fewer, 2)
    try:
        with torch.no_grad():
            return round(_time_layer(rig, method, case, bytes_held), 2)
    except DoesNotFit as error:
        return str(error)
    except Exception as error:
        return failure(error)


def _time_layer(rig: Rig, method: str, case: Case, bytes_held: int) -> float:
    """Calls rotate through layers, so that none finds its KV in the L2."""
    sets = input_sets(bytes_held) if rig.on_gpu else 1
    core = rig.core(method, rig.state(case), layers=sets)
    core.at(case.new)
    size = case.batch, rig.shape.heads, rig.shape.head_dim
    q = [torch.randn(size, device=rig.device).to(rig.dtype) for _ in range(sets)]

    def call(index: int) -> torch.Tensor:
        return core.attend(index, q[index], rig.shape.head_dim**-0.5)

    try:
        return replay_us(call, sets, repeats=5) if rig.on_gpu else 1e6 * wall_seconds(lambda: call(0), warm=1)[0]
    finally:
        if rig.on_gpu:
            torch.cuda.empty_cache()


def _document(length: int, new: int, count: int, rig: Rig) -> Row:
    """Random tokens stand for the words: times do not depend on them."""
    document = tokens(length, rig.shape.vocab, seed=11)
    questions = [tokens(QUESTION_TOKENS, rig.shape.vocab, seed=1000 + index) for index in range(count)]
    row = step_row(two_level(count, length, new, private=QUESTION_TOKENS), rig, ("flash", "hydragen", "ours"))
    whole = [np.concatenate((document, question)) for question in questions]
    engine_seconds(rig, [prompt[-64:] for prompt in whole], n=1, new=2)
    prefill = engine_seconds(rig, [document], n=1, new=1)["seconds"]
    ours = engine_seconds(rig, whole, n=1, new=new)
    for found in row["methods"].values():
        if "step_ms" in found:
            found["total_s"] = round(prefill + found["step_ms"] * new / 1e3, 3)
    return row | {"engine": ours, "prefill_s": prefill, "question_tokens": QUESTION_TOKENS}


def _problem(case: Case, rig: Rig) -> Row:
    row = step_row(case, rig, ("flash", "hydragen", "hydragen, two levels", "ours"))
    for name, found in row["methods"].items():
        if "step_ms" in found:
            row["methods"][name] = found | {"decode_s": round(found["step_ms"] * case.new / 1e3, 3)}
    return row


def _samples(case: Case, n: int, rig: Rig) -> Row:
    on, off = rig.state(case), rig.state(case, share=False)
    methods = {
        "none": rig.ceiling(on, False),
        "ours, sharing": rig.measure("ours", on),
        "ours, not sharing": rig.measure("ours", off),
        "hydragen": rig.measure("hydragen", on),
    }
    return case.row("step", rig.shape) | {"n": n, "methods": methods}


def tokens(count: int, vocab: int, seed: int) -> np.ndarray:
    """``[count]`` random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)


def engine_seconds(rig: Rig, prompts: list[np.ndarray], n: int, new: int, compiled: bool = False) -> Row:
    """Sample ``n`` continuations of each prompt at temperature 1, all to their full length; prefill counts.

    With ``compiled`` layers the run is the engine's second: compiling takes longer than most runs.
    """
    model = rig.model
    rig.drop_arena()
    params = SamplingParams(n=n, temperature=1.0, max_new_tokens=new, seed=1)
    requests = [Request(index, prompt, params) for index, prompt in enumerate(prompts)]
    budget = int(torch.cuda.mem_get_info(rig.device)[0] * MEMORY_SHARE) if rig.on_gpu else None
    engine = make_engine(model, requests, kv_budget=budget, compiled=compiled)
    if compiled:
        engine.run(requests)
        engine.report = Report()
    engine.run(requests)
    report = engine.report
    return {
        "seconds": round(report.seconds, 4),
        "new_tokens": report.new_tokens,
        "tokens_per_s": round(report.new_tokens / report.seconds, 1),
        "steps": report.steps,
    }


def _engine_row(batch: int, prefix: int, new: int, rig: Rig) -> Row:
    """One prompt, ``batch`` samples."""
    prompt = tokens(prefix, rig.shape.vocab, seed=prefix)
    # What is made once, kernels and the like, does not count.
    engine_seconds(rig, [prompt[:64]], n=batch, new=4)
    ours = engine_seconds(rig, [prompt], n=batch, new=new)
    compiled = engine_seconds(rig, [prompt], n=batch, new=new, compiled=True) if rig.on_gpu else None
    prefill = engine_seconds(rig, [prompt], n=1, new=1)["seconds"]
    case = {"batch": batch, "prefix": prefix, "new": new}
    return {"kind": "engine", "case": case, "ours": ours, "compiled": compiled, "prefill_s": prefill}


def _engine_latency(requests: int, prompt: int, new: int, n: int, rig: Rig) -> Row:
    """What a token more takes a run: the difference between a long run and a short one."""
    prompts = [tokens(prompt, rig.shape.vocab, seed=50 + index) for index in range(requests)]
    few = max(new // 4, 2)
    engine_seconds(rig, prompts, n, 2)
    short, long = (engine_seconds(rig, prompts, n, count)["seconds"] for count in (few, new))
    latency = (long - short) / (new - few) * 1e3
    return {"kind": "engine", "n": n, "case": {"requests": requests, "prompt": prompt}, "step_ms": round(latency, 3)}


def _generate(batch: int, prompt: int, rig: Rig) -> Row:
    """``model.generate(do_sample=True)``: a step is the difference between a longer run and a shorter one."""
    model, one = rig.model, _stock_prompt(rig, prompt)
    ids = one.expand(batch, -1)
    ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}

    def run(new: int) -> float:
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=True, **ends)
        _synchronize(rig)
        return time.perf_counter() - began

    with torch.inference_mode():
        run(STOCK_WARM)
        short, long = run(STOCK_WARM), run(STOCK_WARM + STOCK_STEPS)
    return _stock("model.generate", batch, prompt, (long - short) / STOCK_STEPS, prefill=short)


def _expand(batch: int, prompt: int, rig: Rig) -> Row:
    """The prompt's cache computed once and repeated for each sample, then plain steps."""
    from transformers import DynamicCache

    model, ids = rig.model, _stock_prompt(rig, prompt)
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode():
        began = time.perf_counter()
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        cache.batch_repeat_interleave(batch)
        logits = logits.expand(batch, -1)
        _synchronize(rig)
        prefill = time.perf_counter() - began
        for step in range(STOCK_WARM + STOCK_STEPS):
            if step == STOCK_WARM:
                _synchronize(rig)
                began = time.perf_counter()
            sampled = torch.multinomial(logits.float().softmax(-1), 1)
            logits = model(sampled, past_key_values=cache, use_cache=True).logits[:, -1]
        _synchronize(rig)
    return _stock("prefill once, expand", batch, prompt, (time.perf_counter() - began) / STOCK_STEPS, prefill)


def _stock_prompt(rig: Rig, prompt: int) -> torch.Tensor:
    rig.drop_arena()
    return torch.from_numpy(tokens(prompt, rig.shape.vocab, seed=3)).long().to(rig.device)[None]


def _stock(what: str, batch: int, prompt: int, step: float, prefill: float) -> Row:
    rates = {"step_ms": round(step * 1e3, 3), "tokens_per_s": round(batch / step, 1), "prefill_s": round(prefill, 4)}
    return {"kind": "stock", "what": what, "case": {"batch": batch, "prefix": prompt, "steps": STOCK_STEPS}, **rates}


def _synchronize(rig: Rig) -> None:
    if rig.on_gpu:
        torch.cuda.synchronize()
