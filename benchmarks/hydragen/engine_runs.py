"""Whole runs: prompts through prefill and decode by the engine, and by transformers as it comes."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.hydragen.jobs import Job, Row
from benchmarks.hydragen.step import Rig
from prefixkit.api import make_engine
from prefixkit.engine.report import Report
from prefixkit.engine.request import Request
from prefixkit.sampling.params import SamplingParams

# Part of the memory that is free which KV may take.
MEMORY_SHARE = 0.85
# Steps of stock transformers that are timed, after as many as warm it up.
STOCK_STEPS, STOCK_WARM = 12, 2


def tokens(count: int, vocab: int, seed: int) -> np.ndarray:
    """``[count]`` random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)


def engine_seconds(rig: Rig, prompts: list[np.ndarray], n: int, new: int, compiled: bool = False) -> Row:
    """Sample ``n`` continuations of each prompt at temperature 1, all to their full length; prefill counts.

    With ``compiled`` layers the run is the engine's second: compiling takes longer than most runs.
    """
    model, device = rig.model, rig.device
    rig.drop_arena()
    params = SamplingParams(n=n, temperature=1.0, max_new_tokens=new, seed=1)
    requests = [Request(index, prompt, params) for index, prompt in enumerate(prompts)]
    budget = int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE) if device.type == "cuda" else None
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


def engine_job(letter: str, shape: str, batch: int, prefix: int, new: int, priority: int) -> Job:
    """One prompt, ``batch`` samples."""
    name = f"engine b{batch} p{prefix} n{new}"
    return Job(letter, shape, name, priority, 15.0, partial(_engine_row, batch, prefix, new))


def _engine_row(batch: int, prefix: int, new: int, rig: Rig) -> Row:
    prompt = tokens(prefix, rig.shape.vocab, seed=prefix)
    # What is made once, kernels and the like, does not count.
    engine_seconds(rig, [prompt[:64]], n=batch, new=4)
    ours = engine_seconds(rig, [prompt], n=batch, new=new)
    compiled = engine_seconds(rig, [prompt], n=batch, new=new, compiled=True) if rig.device.type == "cuda" else None
    first = engine_seconds(rig, [prompt], n=1, new=1)
    return {
        "kind": "engine",
        "case": {"batch": batch, "prefix": prefix, "new": new},
        "ours": ours,
        "compiled": compiled,
        "prefill_s": first["seconds"],
    }


def stock_jobs(letter: str, shapes: list[str]) -> list[Job]:
    """transformers as it comes, on the model where both of its ways fit."""
    found = []
    for shape, (first, second, prompt) in {"Llama-3.1-8B": (64, 256, 2048), "tiny": (2, 4, 16)}.items():
        if shape in shapes:
            found.append(Job(letter, shape, f"generate b{first} p{prompt}", 1, 6.0, partial(_generate, first, prompt)))
            found.append(Job(letter, shape, f"expand b{second} p{prompt}", 1, 8.0, partial(_expand, second, prompt)))
    return found


def _generate(batch: int, prompt: int, rig: Rig) -> Row:
    """``model.generate(do_sample=True)``: a step is the difference between a longer run and a shorter one."""
    model, device = rig.model, rig.device
    rig.drop_arena()
    ids = torch.from_numpy(tokens(prompt, rig.shape.vocab, seed=3)).long().to(device).expand(batch, -1)

    def run(new: int) -> float:
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            pad_token_id=0,
            eos_token_id=None,
        )
        _synchronize(device)
        return time.perf_counter() - began

    with torch.inference_mode():
        run(STOCK_WARM)
        short, long = run(STOCK_WARM), run(STOCK_WARM + STOCK_STEPS)
    return _stock("model.generate", batch, prompt, (long - short) / STOCK_STEPS, prefill=short)


def _expand(batch: int, prompt: int, rig: Rig) -> Row:
    """The prompt's cache computed once and repeated for each sample, then plain steps."""
    from transformers import DynamicCache

    model, device = rig.model, rig.device
    rig.drop_arena()
    ids = torch.from_numpy(tokens(prompt, rig.shape.vocab, seed=3)).long().to(device)[None]
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode():
        began = time.perf_counter()
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        cache.batch_repeat_interleave(batch)
        logits = logits.expand(batch, -1)
        _synchronize(device)
        prefill = time.perf_counter() - began
        for step in range(STOCK_WARM + STOCK_STEPS):
            if step == STOCK_WARM:
                _synchronize(device)
                began = time.perf_counter()
            drawn = torch.multinomial(logits.float().softmax(-1), 1)
            logits = model(drawn, past_key_values=cache, use_cache=True).logits[:, -1]
        _synchronize(device)
    return _stock("prefill once, expand", batch, prompt, (time.perf_counter() - began) / STOCK_STEPS, prefill)


def _stock(what: str, batch: int, prompt: int, step: float, prefill: float) -> Row:
    return {
        "kind": "stock",
        "what": what,
        "case": {"batch": batch, "prefix": prompt, "steps": STOCK_STEPS},
        "step_ms": round(step * 1e3, 3),
        "tokens_per_s": round(batch / step, 1),
        "prefill_s": round(prefill, 4),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
