"""Rotary embedding and appending of a decode step: one launch, and what torch.compile makes of it around ``kv_append``.

    python benchmarks/rotary.py [--rows 64,256,1024] [--heads 32] [--kv-heads 8] [--head-dim 128] [--out FILE]

bf16, queries, keys and values as parts of one product, a page of 16 tokens for each row; in a CUDA graph over inputs that
together pass twice the L2 where eight sets of them do.  Microseconds a layer, median; the floor is every byte once at 4.3 TB/s,
though most of a step's come from the L2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tree_attention.timing import input_sets, machine, replay_us
from prefixkit.ops import library as ops
from prefixkit.ops.kv_pool import KVPool, KVSpec

BANDWIDTH = 4.3e12  # bytes a second, an H200's
PAGE = 16


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers writes it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def measure(rows: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    size = 2 * rows * head_dim * (2 * heads + 4 * kv_heads + 2)
    count = input_sets(size)
    pool = KVPool(KVSpec(count, kv_heads, head_dim, torch.bfloat16, torch.device("cuda")), rows, PAGE)
    slots = torch.arange(rows, device="cuda") * PAGE + 3
    cos, sin = torch.randn(2, rows, head_dim, device="cuda", dtype=torch.bfloat16)
    products = [
        torch.randn(rows, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(count)
    ]
    parts = [x.split([heads, kv_heads, kv_heads], 1) for x in products]
    torch._dynamo.reset()  # kernels of this number of rows and of these heads, as a compiled layer has them
    compiled: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(turned, dynamic=False)

    def apart(layer: int) -> Tensor:
        q, k, v = parts[layer]
        pool.append(layer, compiled(k, cos, sin), v, slots)
        return compiled(q, cos, sin)

    def one(layer: int) -> Tensor:
        rotated: Tensor = torch.ops.prefixkit.rotary_append(
            *parts[layer], cos, sin, pool.k(layer), pool.v(layer), slots
        )
        return rotated

    expected, keys = apart(0).clone(), pool.k(0).clone()
    pool.k(0).zero_()
    same = bool(torch.equal(one(0), expected)) and bool(torch.equal(pool.k(0)[:, 3], keys[:, 3]))
    found = {
        "rows": rows,
        "heads": [heads, kv_heads],
        "head_dim": head_dim,
        "floor_us": round(size / BANDWIDTH * 1e6, 2),
    }
    times = {name: round(replay_us(run, count), 2) for name, run in (("apart", apart), ("one", one))}
    return {**found, "us": times, "same bits": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="64,256,1024")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    assert ops.SCHEMAS
    torch.set_grad_enabled(False)
    results = []
    for rows in map(int, options.rows.split(",")):
        results.append(measure(rows, options.heads, options.kv_heads, options.head_dim))
        print(json.dumps(results[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps({**machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
