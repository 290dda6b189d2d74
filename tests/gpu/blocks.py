"""Float64 attention and torch's flash attention for some of a forest's queries, a block of them at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixkit.testing.forests import Case
from prefixkit.testing.gpu_forests import path_slots

# Scores of a block in float64: half a gigabyte.
MOST_SCORES = 1 << 26


@dataclass(frozen=True)
class Block:
    """Consecutive queries: tokens ``[begin, end)`` of a node are rows ``row...`` of the step."""

    node: int
    begin: int
    end: int
    row: int


def sample(rng: np.random.Generator, case: Case, whole: int = 4, single: int = 20, most: int = 128) -> list[Block]:
    """All rows of a few runs (at most ``most`` in a row of each), and some rows from anywhere."""
    queries = case.queries
    count = (queries.end - queries.begin).astype(np.int64)
    first_row = np.cumsum(count) - count
    blocks = []
    for run in rng.choice(len(count), min(whole, len(count)), replace=False).tolist():
        tokens = int(case.snapshot.start[queries.node[run]] + queries.end[run])
        rows = max(1, min(most, MOST_SCORES // (tokens * case.q.shape[1]), int(count[run])))
        skip = int(rng.integers(count[run] - rows + 1))
        begin = int(queries.begin[run]) + skip
        end = begin + rows
        blocks.append(Block(int(queries.node[run]), begin, end, int(first_row[run]) + skip))
    rows = rng.choice(queries.num_rows, min(single, queries.num_rows), replace=False)
    # The first and the last row are where a plan's bounds are.
    for row in {0, queries.num_rows - 1, *rows.tolist()}:
        run = int(np.searchsorted(first_row, row, side="right")) - 1
        token = int(queries.begin[run] + row - first_row[run])
        blocks.append(Block(int(queries.node[run]), token, token + 1, row))
    return blocks


@dataclass(frozen=True)
class Measured:
    """Errors of a forest's sampled rows against float64, ours and torch's.

    Attributes:
        ours, theirs: Largest and root mean square, over all elements.
        largest: Largest exact output, absolute.
        lse: Largest difference of the log-sum-exp, over what float32 owes it (1e-4 + 1e-5 of its size).
    """

    ours: tuple[float, float]
    theirs: tuple[float, float]
    largest: float
    lse: float
    eps: float

    @property
    def ratio(self) -> float:
        """Largest error over torch's; torch's counts as half a unit in the last place of the largest output at least.

        An output that happens to fall on a representable number leaves torch no error at all, and us nothing to compare
        with.
        """
        return self.ours[0] / max(self.theirs[0], self.eps / 2 * self.largest, 1e-30)


def measure(case: Case, out: Tensor, lse: Tensor, blocks: list[Block]) -> Measured:
    """Errors of ``out`` and ``lse`` in these blocks, and of torch's flash attention on the same numbers."""
    sums: list[Tensor] = []
    tops: list[Tensor] = []
    elements = 0
    for block in blocks:
        q, k, v = operands(case, block)
        exact, exact_lse = exactly(q, k, v, case.scale)
        rows = slice(block.row, block.row + len(q))
        ours, theirs = out[rows].double() - exact, flash(q, k, v, case.scale).double() - exact
        off = (lse[rows].double() - exact_lse).abs() / (1e-4 + 1e-5 * exact_lse.abs())
        # NaN must win, so it is turned into infinity before a maximum can lose it.
        ours, off = ours.nan_to_num(nan=torch.inf), off.nan_to_num(nan=torch.inf)
        tops.append(torch.stack([ours.abs().max(), theirs.abs().max(), exact.abs().max(), off.max()]))
        sums.append(torch.stack([ours.square().sum(), theirs.square().sum()]))
        elements += exact.numel()
    top = torch.stack(tops).amax(0).tolist()
    root = (torch.stack(sums).sum(0) / elements).sqrt().tolist()
    return Measured((top[0], root[0]), (top[1], root[1]), top[2], top[3], torch.finfo(case.q.dtype).eps)


def operands(case: Case, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """``q [rows, heads, head_dim]``; ``k, v [tokens, kv_heads, head_dim]``, all that the block's last query sees."""
    slots = torch.from_numpy(path_slots(case.snapshot, block.node, block.end)).to(case.q.device)
    page_size = case.k_pages.shape[1]
    k, v = (pages[slots // page_size, slots % page_size] for pages in (case.k_pages, case.v_pages))
    return case.q[block.row : block.row + block.end - block.begin], k, v


def exactly(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``out [rows, heads, head_dim]``, ``lse [rows, heads]`` in float64: row ``i`` misses the last ``rows - 1 - i``."""
    rows, heads, head_dim = q.shape
    tokens, kv_heads = k.shape[:2]
    by_head = q.double().view(rows, kv_heads, -1, head_dim).permute(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
    score = by_head @ k.double().permute(1, 2, 0) * scale
    if rows > 1:
        last = torch.arange(tokens - rows, tokens, device=q.device).repeat_interleave(heads // kv_heads)
        score.masked_fill_(torch.arange(tokens, device=q.device) > last[:, None], -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    out = torch.exp(score - lse[..., None]) @ v.double().transpose(0, 1)
    out = out.view(kv_heads, rows, -1, head_dim).transpose(0, 1).reshape(rows, heads, head_dim)
    return out, lse.view(kv_heads, rows, -1).transpose(0, 1).reshape(rows, heads)


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Torch's flash attention kernel on the same rows; where queries are fewer than keys it aligns their ends."""
    if q.device.type == "cpu":  # to try this file without a GPU
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        by_head = (t.transpose(0, 1)[None] for t in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*by_head, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
    result: Tensor = torch.ops.aten._flash_attention_forward(
        q[None], k[None], v[None], None, None, len(q), len(k), 0.0, len(q) > 1, False, scale=scale
    )[0]
    return result[0]
