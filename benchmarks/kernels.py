"""Single kernels on one GPU: rotary embedding with appending, sampling, products of one input, steps of states.

    python -m benchmarks.kernels --kernel rotary|sampling|products|states [--rows 64,256,1024] [--out FILE]

Microseconds of captured graphs over inputs from memory; the floor is every byte once at 4.3 TB/s.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

import prefixkit.backends  # noqa: F401  (registers them)
from benchmarks.runner import Replay, Row, Run, arguments, in_turns, input_sets, replay_us, wall_seconds
from benchmarks.tree_attention.workloads import PAGE, READ_TBPS
from prefixkit.kv.kv_pool import KVPool
from prefixkit.ops import library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.runners.sampler import Sampler
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.specification import SamplingBatch
from prefixkit.testing.kv_specs import spec_of_alike

LAYERS = 8
GROUPS = {"q, k, v": (4096, 1024, 1024), "k, v": (1024, 1024), "gate, up": (14336, 14336)}
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


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as in transformers."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def rotary(run: Run, options: argparse.Namespace) -> None:
    """One launch against torch.compile's code around ``kv_append``: bf16 parts of one product, a page a row."""
    for rows in options.rows or (64, 256, 1024):
        run.add("results", rotary_row(rows, options.heads, options.kv_heads, options.head_dim))


def rotary_row(rows: int, heads: int, kv_heads: int, head_dim: int) -> Row:
    size = 2 * rows * head_dim * (2 * heads + 4 * kv_heads + 2)
    count, like = input_sets(size), {"device": "cuda", "dtype": torch.bfloat16}
    pool = KVPool(spec_of_alike(count, kv_heads, head_dim, torch.bfloat16, torch.device("cuda")), rows, PAGE)
    slots = torch.arange(rows, device="cuda") * PAGE + 3
    cos, sin = torch.randn(2, rows, head_dim, **like)
    products = [torch.randn(rows, heads + 2 * kv_heads, head_dim, **like) for _ in range(count)]
    parts = [x.split([heads, kv_heads, kv_heads], 1) for x in products]
    torch._dynamo.reset()  # kernels of this number of rows and of these heads, as a compiled layer has them
    compiled = torch.compile(rotated, dynamic=False)

    def apart(layer: int) -> Tensor:
        q, k, v = parts[layer]
        torch.ops.prefixkit.kv_append(compiled(k, cos, sin), v, *pool.pages(layer), slots)
        return compiled(q, cos, sin)

    def one(layer: int) -> Tensor:
        return torch.ops.prefixkit.rotary_append(*parts[layer], cos, sin, *pool.pages(layer), slots)

    expected, keys = apart(0).clone(), pool.pages(0)[0].clone()
    pool.pages(0)[0].zero_()
    same = bool(torch.equal(one(0), expected)) and bool(torch.equal(pool.pages(0)[0][:, 3], keys[:, 3]))
    times = in_turns({name: Replay(run, count).us for name, run in (("apart", apart), ("one", one))}, turns=3)
    us = {name: round(statistics.median(found), 2) for name, found in times.items()}
    row: Row = {"rows": rows, "heads": [heads, kv_heads], "head_dim": head_dim}
    return row | {"floor_us": round(size / READ_TBPS / 1e6, 2), "us": us, "same bits": same}


def multinomial(logits: Tensor) -> Tensor:
    return torch.multinomial(torch.softmax(logits.float() / TEMPERATURE, -1), 1)


def gumbel(logits: Tensor) -> Tensor:
    noise = torch.empty(logits.shape, device=logits.device).exponential_().log_()
    return torch.sub(logits.float() / TEMPERATURE, noise).argmax(-1)


def sorted_top_p(logits: Tensor) -> Tensor:
    """Top-p sampling as in transformers."""
    ranked, ids = torch.sort(logits.float() / TEMPERATURE, descending=True)
    weights = torch.softmax(ranked, -1)
    beyond = weights.cumsum(-1) - weights >= TOP_P
    return ids.gather(1, torch.multinomial(weights.masked_fill_(beyond, 0), 1))


# Rivals sample from the same distribution, but other tokens; the first two have no filters.
RIVALS = {"multinomial": multinomial, "gumbel": gumbel, "sorted top-p": sorted_top_p}


def sampling(run: Run, options: argparse.Namespace) -> None:
    """One launch for all rows, against one read of the logits and torch's ways."""
    run.result |= {"seed": SEED, "spread": SPREAD, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": TOP_K}
    print(f"us (times the floor), seed {SEED}, logits {SPREAD} x normal", flush=True)
    sizes = itertools.product(options.vocab, options.rows or (64, 256, 1024), (torch.float32, torch.bfloat16))
    for vocab, rows, dtype in sizes:
        found = sampling_row(rows, vocab, dtype, not options.no_rivals)
        floor = found["floor_us"]
        ours = "  ".join(f"{name} {us:.0f} ({us / floor:.2f})" for name, us in found["us"].items())
        rivals = "  ".join(f"{name} {us:.0f}" for name, us in found.get("rivals_us", {}).items())
        text = f"{rows:5} x {vocab:6} {found['dtype']:8} floor {floor:.0f} us: {ours} | {rivals}"
        run.add("results", found, text)


def sampling_row(rows: int, vocab: int, dtype: torch.dtype, rivals: bool) -> Row:
    size = rows * vocab * dtype.itemsize
    generator = torch.Generator("cuda").manual_seed(SEED)
    normal = (torch.randn(rows, vocab, device="cuda", generator=generator) for _ in range(input_sets(size)))
    sets = [(logits * SPREAD).to(dtype) for logits in normal]
    found: Row = {"rows": rows, "vocab": vocab, "dtype": str(dtype).removeprefix("torch.")}
    found |= {"floor_us": size / READ_TBPS / 1e6, "us": {}}
    for name, params in PARAMS.items():
        rng, sampler = np.random.default_rng(SEED), Sampler(rows, vocab, "cuda")
        each, histories = [params[row % len(params)] for row in range(rows)], rng.integers(0, vocab, (rows, 1000))
        keys = rng.integers(0, 2**64, rows, dtype=np.uint64)
        sampler.upload_params(slice(None), SamplingBatch(each, keys, np.zeros(rows, dtype=int), list(histories)))
        found["us"][name] = replay_us(lambda index, sampler=sampler: sampler.sample(sets[index]), len(sets))
        assert int(sampler.tokens.min()) >= 0
    for name, run in RIVALS.items() if rivals else ():  # with the host's part: code that waits cannot be captured
        seconds = wall_seconds(partial(run, sets[0]), 5, 1, torch.cuda.synchronize)
        found.setdefault("rivals_us", {})[name] = 1e6 * statistics.median(seconds)
    return found


def products(run: Run, options: argparse.Namespace) -> None:
    """bf16 products of a Llama-3.1-8B layer, separate and packed into one: times by which compiled layers choose."""
    for rows, (name, columns) in itertools.product(options.rows or (32, 64, 128, 256, 512, 1024), GROUPS.items()):
        apart, packed = (products_us(given, rows, options.width) for given in (columns, (sum(columns),)))
        text = f"{rows:5d} rows  {name:9s} apart {apart:6.1f} us  as one {packed:6.1f} us"
        run.add("results", {"rows": rows, "of": name, "apart_us": apart, "as_one_us": packed}, text)


def products_us(columns: tuple[int, ...], rows: int, width: int) -> float:
    """Microseconds of a layer's products with these numbers of columns, one after the other."""
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    layers = [[torch.randn(n, width, device="cuda", dtype=torch.bfloat16) for n in columns] for _ in range(LAYERS)]
    return round(replay_us(lambda layer: [linear(x, weight) for weight in layers[layer]], LAYERS), 2)


def states(run: Run, options: argparse.Namespace) -> None:
    """One token through a layer of Nemotron-H's shape: the ops, and transformers' torch code on gathered states."""
    for rows in options.rows or (1, 16, 64, 256):
        run.add("results", states_row(rows))


def states_row(rows: int, heads: int = 128, dim: int = 64, size: int = 128, groups: int = 8, width: int = 4) -> Row:
    """Of rows in bf16 whose states go on in their slots."""
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    like, at = {"device": "cuda", "dtype": torch.bfloat16}, torch.arange(1, rows + 1, device="cuda")
    channels, parts = heads * dim + 2 * groups * size, [heads * dim, groups * size, groups * size]
    x, windows = torch.randn(rows, channels, **like), torch.randn(rows + 1, channels, width, **like)
    weight, bias = torch.randn(channels, width, **like), torch.randn(channels, **like)
    inputs, inward, outward = (
        of.view(rows, count, -1) for of, count in zip(x.split(parts, 1), (heads, groups, groups), strict=True)
    )
    dt, rate = torch.randn(rows, heads, **like), -torch.rand(heads, device="cuda")
    held = torch.randn(rows + 1, heads, dim, size, device="cuda")
    skip, dt_bias = torch.randn(2, heads, **like)
    wide = [dt[..., None].expand(-1, -1, dim), rate[:, None, None].expand(-1, dim, size), inward, outward]
    wide += [of[:, None].expand(-1, dim) for of in (skip, dt_bias)]

    def gathered(states: Tensor, step: Callable[[Tensor], object]) -> None:
        copy = states.index_select(0, at)
        step(copy)
        states.index_copy_(0, at, copy)

    ops, convolve, recur = torch.ops.prefixkit, theirs.causal_conv1d_update, theirs.mamba2_selective_state_update
    ways: dict[str, Callable[[], object]] = {
        "conv_step": lambda: ops.conv_step(x, weight, bias, windows, at, at, True),
        "transformers' convolution": lambda: gathered(
            windows, lambda copy: convolve(x[..., None], copy, weight, bias, "silu")
        ),
        "mamba2_step": lambda: ops.mamba2_step(inputs, dt, rate, inward, outward, skip, dt_bias, None, held, at, at),
        "transformers' recurrence": lambda: gathered(held, lambda copy: recur(copy, inputs, *wide, dt_softplus=True)),
    }
    floors = {"conv_step": rows * channels * (2 * width + 2) * 2, "mamba2_step": 2 * held[1:].nbytes}
    us = {name: round(replay_us(lambda _, way=way: way()), 2) for name, way in ways.items()}
    return {"rows": rows, "us": us, "floor_us": {of: round(floors[of] / READ_TBPS / 1e6, 2) for of in floors}}


def main() -> None:
    kernels = {"rotary": rotary, "sampling": sampling, "products": products, "states": states}
    sizes: Row = {"rows": [], "heads": 32, "kv_heads": 8, "head_dim": 128, "width": 4096, "vocab": [32_000, 128_256]}
    options = arguments(__doc__, kernel={"choices": kernels, "required": True}, **sizes, no_rivals=False)
    torch.set_grad_enabled(False)
    run = Run(options)
    kernels[options.kernel](run, options)
    run.finish()


if __name__ == "__main__":
    main()
