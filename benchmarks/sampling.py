"""What sampling costs on a GPU: one launch for all rows, against the time to read the logits and against torch's ways.

    python -m benchmarks.sampling --out benchmarks/results/sampling.json

Rivals: softmax and ``multinomial``; Gumbel noise and an argmax (neither knows filters); top-p by a sort, as
transformers has it.  They sample from the same distribution, not the same tokens.
"""

from __future__ import annotations

import itertools
import statistics
from functools import partial

import numpy as np
import torch
from torch import Tensor

import prefixkit.backends  # noqa: F401  (registers them)
from benchmarks.runner import Row, Run, arguments, input_sets, replay_us, wall_seconds
from benchmarks.tree_attention.workloads import READ_TBPS
from prefixkit.runners.sampler import Sampler
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.specification import SamplingBatch

SPREAD, SEED, TEMPERATURE, TOP_P, TOP_K = 3.0, 0, 0.8, 0.95, 50
FILTERS = {
    "greedy": {"temperature": 0},
    "plain": {},
    "top-k": {"top_k": TOP_K},
    "top-p": {"top_p": TOP_P},
    "min-p": {"min_p": 0.05},
    "all filters": {"top_k": TOP_K, "top_p": TOP_P, "min_p": 0.05},
    "penalty": {"repetition_penalty": 1.2},
}
PARAMS = {name: [SamplingParams(**{"temperature": TEMPERATURE} | given)] for name, given in FILTERS.items()}
PARAMS["mixed"] = [params for each in PARAMS.values() for params in each]


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


RIVALS = {"multinomial": multinomial, "gumbel": gumbel, "sorted top-p": sorted_top_p}


def sampler_for(rows: int, vocab: int, params: list[SamplingParams]) -> Sampler:
    rng = np.random.default_rng(SEED)
    sampler = Sampler(rows, vocab, "cuda")
    each = [params[row % len(params)] for row in range(rows)]
    histories = [rng.integers(0, vocab, 1000) for _ in range(rows)]
    keys, steps = rng.integers(0, 2**64, rows, dtype=np.uint64), np.zeros(rows, dtype=int)
    sampler.load(slice(None), SamplingBatch(each, keys, steps, histories))
    return sampler


def measure(rows: int, vocab: int, dtype: torch.dtype, rivals: bool) -> Row:
    """Times in microseconds, and the floor: one read of the logits."""
    size = rows * vocab * dtype.itemsize
    generator = torch.Generator("cuda").manual_seed(SEED)
    normal = (torch.randn(rows, vocab, device="cuda", generator=generator) for _ in range(input_sets(size)))
    sets = [(logits * SPREAD).to(dtype) for logits in normal]
    found: Row = {"rows": rows, "vocab": vocab, "dtype": str(dtype).removeprefix("torch.")}
    found |= {"floor_us": size / READ_TBPS / 1e6, "us": {}}
    for name, params in PARAMS.items():
        sampler = sampler_for(rows, vocab, params)
        found["us"][name] = replay_us(lambda index, sampler=sampler: sampler.sample(sets[index]), len(sets))
        assert int(sampler.tokens.min()) >= 0
    if rivals:  # the host's part included: what waits for the GPU cannot be captured
        times = {
            name: wall_seconds(partial(run, sets[0]), 5, 1, torch.cuda.synchronize) for name, run in RIVALS.items()
        }
        found["rivals_us"] = {name: 1e6 * statistics.median(seconds) for name, seconds in times.items()}
    return found


def line(found: Row) -> str:
    what, floor = f"{found['rows']:5} x {found['vocab']:6} {found['dtype']:8}", found["floor_us"]
    ours = "  ".join(f"{name} {us:.0f} ({us / floor:.2f})" for name, us in found["us"].items())
    rivals = "  ".join(f"{name} {us:.0f}" for name, us in found.get("rivals_us", {}).items())
    return f"{what} floor {floor:.0f} us: {ours} | {rivals}"


def main() -> None:
    options = arguments(__doc__, rows=[64, 256, 1024], vocab=[32_000, 128_256], no_rivals=False)
    run = Run(options)
    run.result |= {"seed": SEED, "spread": SPREAD, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": TOP_K}
    print(f"us (times the floor), seed {SEED}, logits {SPREAD} x normal", flush=True)
    for vocab, rows, dtype in itertools.product(options.vocab, options.rows, (torch.float32, torch.bfloat16)):
        found = measure(rows, vocab, dtype, not options.no_rivals)
        run.add("results", found, line(found))
    run.finish()


if __name__ == "__main__":
    main()
