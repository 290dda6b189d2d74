"""What each row of ``jobs.toml`` measures: functions of a :class:`Rig` and the row's numbers."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.cpu_sampling import prefill_once
from benchmarks.hydragen.cases import Case, two_level
from benchmarks.hydragen.methods import METHODS
from benchmarks.hydragen.report import SMALLER_FLASH
from benchmarks.hydragen.step import Rig
from benchmarks.runner import Row, input_sets, replay_us, wall_seconds
from benchmarks.tree_attention.rivals import MOST_EXPANDED_BYTES
from prefixkit.engine.request import Request
from prefixkit.engine.sharing_report import Report
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine

FLOORS, SLACK = 1.35, 0.03  # what the aim allows beside the compiled ceiling: of attention's floor, and of all
STOCK_STEPS, STOCK_WARM = 12, 2  # of stock transformers: those that are timed, after some that warm it up
QUESTION_TOKENS = 14


def throughput(rig: Rig, batch: int, prefix: int, new: int) -> Row:
    """Where flash does not fit, also what it reaches at the largest batch that does, a power of two below."""
    case = two_level(batch, prefix, new)
    row = step_row(case, rig, ("flash", "hydragen", "ours"), compiled=("ours", "hydragen"))
    if "step_ms" not in row["methods"]["flash"]:
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
    measured |= {method: rig.measure(method, state) for method in methods}
    measured |= {f"{method}, compiled": rig.measure(method, state, compiled=True) for method in compiled}
    row = case.row("step", rig.shape) | {"methods": measured}
    if ceiling := measured.get("none, compiled", {}).get("step_ms"):
        row["aim_ms"] = round((ceiling + FLOORS * case.mean_floor_ms(rig.shape)) * (1 + SLACK), 4)
    return row


def grid(rig: Rig, suffix: int, batches: list[int], prefixes: list[int]) -> Row:
    """One layer's attention, with the shape's heads."""
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

    def timed() -> Row:
        """Calls rotate through layers, so that none finds its KV in the L2."""
        sets = input_sets(bytes_held) if rig.on_gpu else 1
        core = rig.core(method, rig.state(case), layers=sets)
        core.at(case.new)
        size = case.batch, rig.shape.heads, rig.shape.head_dim
        q = [torch.randn(size, device=rig.device).to(rig.dtype) for _ in range(sets)]

        def call(index: int) -> torch.Tensor:
            return core.attend(index, q[index], rig.shape.head_dim**-0.5)

        us = replay_us(call, sets, repeats=5) if rig.on_gpu else 1e6 * wall_seconds(lambda: call(0), warm=1)[0]
        return {"us": round(us, 2)}

    found = rig.attempt(timed)
    return found.get("skipped") or found["us"]


def document(rig: Rig, length: int, new: int, count: int) -> Row:
    """Random tokens stand for the words: times do not depend on them."""
    text = tokens(length, rig, seed=11)
    questions = [tokens(QUESTION_TOKENS, rig, seed=1000 + index) for index in range(count)]
    row = step_row(two_level(count, length, new, private=QUESTION_TOKENS), rig, ("flash", "hydragen", "ours"))
    whole = [np.concatenate((text, question)) for question in questions]
    engine_seconds(rig, [prompt[-64:] for prompt in whole], n=1, new=2)
    prefill = engine_seconds(rig, [text], n=1, new=1)["seconds"]
    ours = engine_seconds(rig, whole, n=1, new=new)
    for found in row["methods"].values():
        if "step_ms" in found:
            found["total_s"] = round(prefill + found["step_ms"] * new / 1e3, 3)
    return row | {"engine": ours, "prefill_s": prefill, "question_tokens": QUESTION_TOKENS}


def problems(rig: Rig, problems: int, samples: int, shots: int, tokens: int, new: int) -> Row:
    case = Case(((1, shots), (problems, tokens)), problems * samples, new)
    row = step_row(case, rig, ("flash", "hydragen", "hydragen, two levels", "ours"))
    for name, found in row["methods"].items():
        if "step_ms" in found:
            row["methods"][name] = found | {"decode_s": round(found["step_ms"] * new / 1e3, 3)}
    return row


def samples(rig: Rig, requests: int, prompt: int, new: int, n: int) -> Row:
    case = Case(((requests, prompt),), requests * n, new)
    on, off = rig.state(case), rig.state(case, share=False)
    methods = {"none": rig.ceiling(on, False), "ours, sharing": rig.measure("ours", on)}
    methods |= {"ours, not sharing": rig.measure("ours", off), "hydragen": rig.measure("hydragen", on)}
    return case.row("step", rig.shape) | {"n": n, "methods": methods}


def tokens(count: int, rig: Rig, seed: int) -> np.ndarray:
    """``[count]`` random token ids."""
    return np.random.default_rng(seed).integers(0, rig.shape.vocab, count).astype(np.int32)


def engine_seconds(rig: Rig, prompts: list[np.ndarray], n: int, new: int, compiled: bool = False) -> Row:
    """Sample ``n`` continuations of each prompt to their full length; ``compiled``: in a second run."""
    rig.drop("arena")
    params = SamplingParams(n=n, temperature=1.0, max_new_tokens=new, seed=1)
    requests = [Request(index, prompt, params) for index, prompt in enumerate(prompts)]
    budget = int(torch.cuda.mem_get_info(rig.device)[0] * 0.85) if rig.on_gpu else None  # of the memory that is free
    engine = make_engine(rig.model, requests, kv_budget=budget, compiled=compiled)
    if compiled:
        engine.run(requests)
        engine.report = Report()
    engine.run(requests)
    report, found = engine.report, {"seconds": round(engine.report.seconds, 4), "new_tokens": engine.report.new_tokens}
    return found | {"tokens_per_s": round(report.new_tokens / report.seconds, 1), "steps": report.steps}


def engine(rig: Rig, batch: int, prefix: int, new: int) -> Row:
    """One prompt, ``batch`` samples."""
    prompt = tokens(prefix, rig, seed=prefix)
    engine_seconds(rig, [prompt[:64]], n=batch, new=4)  # kernels and the like, which are made once, do not count
    ours = engine_seconds(rig, [prompt], n=batch, new=new)
    compiled = engine_seconds(rig, [prompt], n=batch, new=new, compiled=True) if rig.on_gpu else None
    prefill = engine_seconds(rig, [prompt], n=1, new=1)["seconds"]
    case = {"batch": batch, "prefix": prefix, "new": new}
    return {"kind": "engine", "case": case, "ours": ours, "compiled": compiled, "prefill_s": prefill}


def latency(rig: Rig, requests: int, prompt: int, new: int, n: int) -> Row:
    """What a token more takes a run: the difference between a long run and a short one."""
    prompts = [tokens(prompt, rig, seed=50 + index) for index in range(requests)]
    few = max(new // 4, 2)
    engine_seconds(rig, prompts, n, 2)
    short, long = (engine_seconds(rig, prompts, n, count)["seconds"] for count in (few, new))
    step_ms = round((long - short) / (new - few) * 1e3, 3)
    return {"kind": "engine", "n": n, "case": {"requests": requests, "prompt": prompt}, "step_ms": step_ms}


def generate(rig: Rig, batch: int, prompt: int) -> Row:
    """``model.generate(do_sample=True)``: a step is the difference between a longer run and a shorter one."""
    rig.drop("arena")
    model, ids = rig.model, torch.from_numpy(tokens(prompt, rig, seed=3)).long().to(rig.device).expand(batch, -1)
    ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}

    def seconds(new: int) -> float:
        given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, **ends}
        return wall_seconds(lambda: model.generate(ids, **given), wait=rig.wait)[0]

    with torch.inference_mode():
        _, short, long = (seconds(new) for new in (STOCK_WARM, STOCK_WARM, STOCK_WARM + STOCK_STEPS))
    return _stock("model.generate", batch, prompt, (long - short) / STOCK_STEPS, prefill=short)


def expand(rig: Rig, batch: int, prompt: int) -> Row:
    """The prompt's cache computed once and repeated for each sample, then plain steps."""
    rig.drop("arena")
    ids = torch.from_numpy(tokens(prompt, rig, seed=3)).long().to(rig.device)[None]
    steps = prefill_once(rig.model, ids, batch, lambda logits: torch.multinomial(logits.float().softmax(-1), 1))
    with torch.inference_mode():
        prefill, *_ = wall_seconds(lambda: next(steps), 1 + STOCK_WARM, wait=rig.wait)
        seconds = wall_seconds(lambda: [next(steps) for _ in range(STOCK_STEPS)], wait=rig.wait)[0]
    return _stock("prefill once, expand", batch, prompt, seconds / STOCK_STEPS, prefill)


def _stock(what: str, batch: int, prompt: int, step: float, prefill: float) -> Row:
    rates = {"step_ms": round(step * 1e3, 3), "tokens_per_s": round(batch / step, 1), "prefill_s": round(prefill, 4)}
    return {"kind": "stock", "what": what, "case": {"batch": batch, "prefix": prompt, "steps": STOCK_STEPS}, **rates}
