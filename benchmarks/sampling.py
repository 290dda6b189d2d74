"""What drawing costs on a GPU: one launch for all rows, against the time to read the logits and against torch's own ways.

    python benchmarks/sampling.py --out benchmarks/results/sampling.json

Rivals in the same process: softmax and ``multinomial``; Gumbel noise and an argmax (neither knows filters); top-p by a sort, as
transformers has it.  They draw from the same law, not the same tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.tree_attention.timing import input_sets, machine, replay_us
from prefixkit.runners.sampler import Sampler
from prefixkit.sampling.params import SamplingParams

BANDWIDTH = 4.3e12  # bytes a second, an H200's
SPREAD, SEED, TEMPERATURE, TOP_P, TOP_K = 3.0, 0, 0.8, 0.95, 50
LAWS = {
    "greedy": [SamplingParams(temperature=0)],
    "plain": [SamplingParams(temperature=TEMPERATURE)],
    "top-k": [SamplingParams(temperature=TEMPERATURE, top_k=TOP_K)],
    "top-p": [SamplingParams(temperature=TEMPERATURE, top_p=TOP_P)],
    "min-p": [SamplingParams(temperature=TEMPERATURE, min_p=0.05)],
    "all filters": [SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P, min_p=0.05)],
    "penalty": [SamplingParams(temperature=TEMPERATURE, repetition_penalty=1.2)],
}
LAWS["mixed"] = [law for laws in LAWS.values() for law in laws]


def multinomial(logits: Tensor) -> Tensor:
    return torch.multinomial(torch.softmax(logits.float() / TEMPERATURE, -1), 1)


def gumbel(logits: Tensor) -> Tensor:
    noise = torch.empty(logits.shape, device=logits.device).exponential_().log_()
    return torch.sub(logits.float() / TEMPERATURE, noise).argmax(-1)


def sorted_top_p(logits: Tensor) -> Tensor:
    ranked, ids = torch.sort(logits.float() / TEMPERATURE, descending=True)
    weights = torch.softmax(ranked, -1)
    beyond = weights.cumsum(-1) - weights >= TOP_P
    return ids.gather(1, torch.multinomial(weights.masked_fill_(beyond, 0), 1))


RIVALS = {"multinomial": (multinomial, "plain"), "gumbel": (gumbel, "plain"), "sorted top-p": (sorted_top_p, "top-p")}


def eager_us(run: Callable[[], object], repeats: int = 5) -> float:
    """Median, the host's part included: what waits for the GPU cannot be captured."""
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began))
    return float(np.median(times))


def sampler_for(rows: int, vocab: int, laws: list[SamplingParams]) -> Sampler:
    rng = np.random.default_rng(SEED)
    sampler = Sampler(rows, vocab, "cuda")
    each = [laws[row % len(laws)] for row in range(rows)]
    histories = [rng.integers(0, vocab, 1000) for _ in range(rows)]
    sampler.load(slice(None), each, rng.integers(0, 2**64, rows, dtype=np.uint64), np.zeros(rows, dtype=int), histories)
    return sampler


def measure(rows: int, vocab: int, dtype: torch.dtype, rivals: bool) -> dict[str, Any]:
    """Times in microseconds, and the floor: one read of the logits."""
    size = rows * vocab * dtype.itemsize
    generator = torch.Generator("cuda").manual_seed(SEED)
    sets = [
        (torch.randn(rows, vocab, device="cuda", generator=generator) * SPREAD).to(dtype)
        for _ in range(input_sets(size))
    ]
    floor = size / BANDWIDTH * 1e6
    found: dict[str, Any] = {
        "rows": rows,
        "vocab": vocab,
        "dtype": str(dtype).removeprefix("torch."),
        "floor_us": floor,
    }
    found["us"] = {}
    for name, laws in LAWS.items():
        sampler = sampler_for(rows, vocab, laws)
        found["us"][name] = replay_us(lambda index, sampler=sampler: sampler.sample(sets[index]), len(sets))
        assert int(sampler.tokens.min()) >= 0
    if rivals:
        found["rivals_us"] = {name: eager_us(lambda run=run: run(sets[0])) for name, (run, _) in RIVALS.items()}
    return found


def line(found: dict[str, Any]) -> str:
    ours = "  ".join(f"{name} {us:.0f} ({us / found['floor_us']:.2f})" for name, us in found["us"].items())
    rivals = "  ".join(f"{name} {us:.0f}" for name, us in found.get("rivals_us", {}).items())
    return (
        f"{found['rows']:5} x {found['vocab']:6} {found['dtype']:8} floor {found['floor_us']:.0f} us: {ours} | {rivals}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--no-rivals", action="store_true")
    options = parser.parse_args()
    print(f"us (times the floor), seed {SEED}, logits {SPREAD} x normal", flush=True)
    results = []
    for vocab in options.vocab:
        for rows in options.rows:
            for dtype in (torch.float32, torch.bfloat16):
                results.append(measure(rows, vocab, dtype, not options.no_rivals))
                print(line(results[-1]), flush=True)
    if options.out:
        known = {"seed": SEED, "spread": SPREAD, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": TOP_K}
        options.out.write_text(json.dumps({**machine(), **known, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
