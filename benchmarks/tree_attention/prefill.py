"""Prompts: whole, in chunks, and several that share, against causal SDPA over flash and cuDNN.

A rival computes every sequence by itself, over KV that was laid out for it before the clock started.  Where prompts share, the
aim is to be ahead by the share: by what the rivals compute over what a tree computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.tree_attention.inputs import GPU, Inputs, Pool, ours, prepare
from benchmarks.tree_attention.timing import replay_us
from benchmarks.tree_attention.workloads import HEAD_DIM, MATMUL_TFLOPS, PAGE, Workload, tree
from prefixkit.attention.bsr import Queries


@dataclass(frozen=True)
class Prompts:
    """``count`` prompts of ``prefix + tokens``, whose last ``chunk`` tokens ask; the shared prefix asks too, or is cached."""

    name: str
    tokens: int
    chunk: int
    count: int = 1
    prefix: int = 0
    prefix_asks: bool = False

    @property
    def length(self) -> int:
        """Of each sequence."""
        return self.prefix + self.tokens

    @property
    def asking(self) -> int:
        """Tokens of each sequence that a rival computes."""
        return self.length if self.prefix_asks else self.chunk

    def workload(self, heads: int, kv_heads: int) -> Workload:
        leaves = [self.tokens] * self.count
        snapshot = (
            tree([-1] + [0] * self.count, [self.prefix, *leaves]) if self.prefix else tree([-1] * self.count, leaves)
        )
        return Workload(self.name, heads, kv_heads, snapshot)

    def queries(self) -> Queries:
        begin, end = [self.tokens - self.chunk] * self.count, [self.tokens] * self.count
        first = 0
        if self.prefix:
            first = 1
            if self.prefix_asks:
                first, begin, end = 0, [0, *begin], [self.prefix, *end]
        node = np.arange(first, first + len(begin), dtype=np.int32)
        return Queries(node, np.array(begin, np.int32), np.array(end, np.int32))

    def flops(self, heads: int) -> tuple[float, float]:
        """Of a tree, and of sequences each for itself."""

        def pairs(asking: int, length: int) -> float:
            return asking * length - asking * (asking - 1) / 2

        of_tree = self.count * pairs(self.chunk, self.length) + self.prefix_asks * pairs(self.prefix, self.prefix)
        return tuple(4.0 * HEAD_DIM * heads * n for n in (of_tree, self.count * pairs(self.asking, self.length)))


PROMPTS = [
    (32, 8, Prompts("prompt of 4K", 4096, 4096)),
    (32, 8, Prompts("prompt of 32K", 32768, 32768)),
    (32, 8, Prompts("prompt of 128K", 131072, 131072)),
    (8, 1, Prompts("prompt of 32K", 32768, 32768)),
    (32, 32, Prompts("prompt of 32K", 32768, 32768)),
    (32, 8, Prompts("8 prompts of 4K", 4096, 4096, count=8)),
    (32, 8, Prompts("2K chunk at the end of 32K", 32768, 2048)),
    (32, 8, Prompts("8K chunk at the end of 128K", 131072, 8192)),
    (32, 8, Prompts("8 x 4K after 32K, cached", 4096, 4096, count=8, prefix=32768)),
    (32, 8, Prompts("8 x 4K after 32K", 4096, 4096, count=8, prefix=32768, prefix_asks=True)),
    (32, 8, Prompts("64 x 512 after 8K", 512, 512, count=64, prefix=8192, prefix_asks=True)),
    (32, 8, Prompts("16 x 1K after 4K", 1024, 1024, count=16, prefix=4096, prefix_asks=True)),
]
Row = dict[str, object]


def measure(only: str) -> list[Row]:
    """One row for each of :data:`PROMPTS` whose name contains ``only``."""
    pool, rows = Pool(), []
    for heads, kv_heads, prompts in PROMPTS:
        if only not in f"{heads}/{kv_heads} {prompts.name}":
            continue
        rows.append(_measure(prompts, heads, kv_heads, pool))
        print(_line(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    return rows


def _measure(prompts: Prompts, heads: int, kv_heads: int, pool: Pool) -> Row:
    workload = prompts.workload(heads, kv_heads)
    queries = prompts.queries()
    workload.snapshot.ready[queries.node] = queries.begin
    inputs = prepare(workload, queries, pool)
    of_tree, of_rivals = prompts.flops(heads)
    row: Row = {
        "heads": [heads, kv_heads],
        "prompts": prompts.name,
        "rows": queries.num_rows,
        "us": round(replay_us(lambda i: ours(inputs, i), 1), 1),
        "floor_us": round(of_tree / MATMUL_TFLOPS / 1e6, 2),
        "share": round(of_rivals / of_tree, 3),
        "plan_ms": round(inputs.plan_ms, 1),
        "rivals": {},
    }
    expected = _by_sequence(ours(inputs, 0), prompts)
    q = _by_sequence(inputs.q[0], prompts).transpose(1, 2).contiguous()
    k, v = (_sequences(inputs, pages[0], prompts) for pages in (inputs.k, inputs.v))
    for name, attend in (("sdpa_flash", _flash), ("sdpa_cudnn", _cudnn)):
        row["rivals"][name] = _time(attend, q, k, v, inputs.scale, expected)
    return row


def _time(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float, expected: Tensor
) -> float | str:
    try:
        out = attend(q, k, v, scale).transpose(1, 2)
        difference = float((out[-1].float() - expected[-1].float()).norm() / expected[-1].float().norm())
        if not difference < 0.02:
            return f"differs from ours by {difference:.3f} of the norm"
        return round(replay_us(lambda _: attend(q, k, v, scale), 1), 1)
    except Exception as error:  # a rival's failure is a result, not ours to mend
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _line(row: Row) -> str:
    name, floor = f"{row['heads'][0]}/{row['heads'][1]} {row['prompts']}", row["floor_us"]
    text = f"{name:34s} {row['us']:10.1f} us = {row['us'] / floor:5.2f} floors of {floor:9.1f}"
    for name, us in row["rivals"].items():
        ratio = f"{us:10.1f} {us / row['us']:5.2f}x of share {row['share']:.2f}" if isinstance(us, float) else us
        text += f" | {name} {ratio}"
    return text + f" | plan {row['plan_ms']} ms"


def _by_sequence(rows: Tensor, prompts: Prompts) -> Tensor:
    """``[count, asking, heads, head size]`` from a tree's rows, the shared ones in each sequence."""
    shared = prompts.prefix if prompts.prefix_asks else 0
    own = rows[shared:].view(prompts.count, prompts.chunk, *rows.shape[1:])
    if not shared:
        return own
    return torch.cat((rows[:shared].expand(prompts.count, *rows[:shared].shape), own), dim=1)


def _sequences(inputs: Inputs, pages: Tensor, prompts: Prompts) -> Tensor:
    """``[count, kv_heads, length, head size]`` the K or V of each sequence."""
    kv_heads = pages.shape[1]
    flat = pages.transpose(0, 1).reshape(kv_heads, -1, HEAD_DIM)
    own = flat[:, prompts.prefix :].view(kv_heads, prompts.count, prompts.tokens, HEAD_DIM).transpose(0, 1)
    shared = flat[:, : prompts.prefix].expand(prompts.count, kv_heads, prompts.prefix, HEAD_DIM)
    assert prompts.prefix % PAGE == 0 and prompts.tokens % PAGE == 0
    return torch.cat((shared, own), dim=2).to(GPU)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal, ends aligned."""
    if q.shape[2] == k.shape[2]:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[0]
        return out
    by_token = (t.transpose(1, 2) for t in (q, k, v))
    sizes = q.shape[2], k.shape[2]
    result: Tensor = torch.ops.aten._flash_attention_forward(
        *by_token, None, None, *sizes, 0.0, True, False, scale=scale
    )[0]
    return result.transpose(1, 2)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal, ends aligned.

    Torch's cuDNN aligns beginnings, so what lies before the queries is a call of its own, without a mask, and merged.
    """
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    count, heads, asking, _ = q.shape
    before = k.shape[2] - asking
    own = attend(q, k[:, :, before:], v[:, :, before:], None, before > 0, 0.0, True, False, scale=scale)
    if not before:
        first: Tensor = own[0]
        return first
    from benchmarks.tree_attention.merge import merge

    past = attend(q, k[:, :, :before], v[:, :, :before], None, True, 0.0, False, False, scale=scale)
    lses = [part[1].view(count, heads, asking) for part in (past, own)]
    merged = merge([past[0], own[0]], lses, [asking, asking], heads)
    return merged.view(count, asking, heads, HEAD_DIM).transpose(1, 2)
