"""Rotary embedding and appending of a decode step: one launch, and what torch.compile makes of it around ``kv_append``.

    python -m benchmarks.rotary [--rows 64,256,1024] [--heads 32] [--kv-heads 8] [--head-dim 128] [--out FILE]

bf16; queries, keys and values are parts of one product, each row has a page.  Microseconds a layer; the floor is every
byte once at 4.3 TB/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import prefixkit.backends  # noqa: F401  (registers them)
from benchmarks.runner import Replay, Row, Run, arguments, in_turns, input_sets
from benchmarks.tree_attention.workloads import PAGE, READ_TBPS
from prefixkit.ops import library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.ops.kv_pool import KVPool, KVSpec


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers writes it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def measure(rows: int, heads: int, kv_heads: int, head_dim: int) -> Row:
    size = 2 * rows * head_dim * (2 * heads + 4 * kv_heads + 2)
    count, like = input_sets(size), {"device": "cuda", "dtype": torch.bfloat16}
    pool = KVPool(KVSpec(count, kv_heads, head_dim, torch.bfloat16, torch.device("cuda")), rows, PAGE)
    slots = torch.arange(rows, device="cuda") * PAGE + 3
    cos, sin = torch.randn(2, rows, head_dim, **like)
    products = [torch.randn(rows, heads + 2 * kv_heads, head_dim, **like) for _ in range(count)]
    parts = [x.split([heads, kv_heads, kv_heads], 1) for x in products]
    torch._dynamo.reset()  # kernels of this number of rows and of these heads, as a compiled layer has them
    compiled: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(rotated, dynamic=False)

    def apart(layer: int) -> Tensor:
        q, k, v = parts[layer]
        pool.append(layer, compiled(k, cos, sin), v, slots)
        return compiled(q, cos, sin)

    def one(layer: int) -> Tensor:
        return torch.ops.prefixkit.rotary_append(*parts[layer], cos, sin, pool.k(layer), pool.v(layer), slots)

    expected, keys = apart(0).clone(), pool.k(0).clone()
    pool.k(0).zero_()
    same = bool(torch.equal(one(0), expected)) and bool(torch.equal(pool.k(0)[:, 3], keys[:, 3]))
    times = in_turns({name: Replay(run, count).us for name, run in (("apart", apart), ("one", one))}, turns=3)
    us = {name: round(statistics.median(found), 2) for name, found in times.items()}
    row: Row = {"rows": rows, "heads": [heads, kv_heads], "head_dim": head_dim}
    return row | {"floor_us": round(size / READ_TBPS / 1e6, 2), "us": us, "same bits": same}


def main() -> None:
    options = arguments(__doc__, rows=[64, 256, 1024], heads=32, kv_heads=8, head_dim=128)
    torch.set_grad_enabled(False)
    run = Run(options)
    for rows in options.rows:
        run.add("results", measure(rows, options.heads, options.kv_heads, options.head_dim))
    run.finish()


if __name__ == "__main__":
    main()
