"""A layer of a model of one's own whose K and V of a token are random, by all tokens up to it; and dense attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import prefixkit
from prefixkit.functional.attend import TreeAttention, TreeStep
from prefixkit.tree import Sequence

HEADS, KV_HEADS, DIM, VOCAB = 4, 2, 64, 9


def pool_of(dtype: torch.dtype, page_size: int, num_pages: int = 512, device: str = "cpu") -> prefixkit.KVPool:
    """A pool of one layer whose slots are NaN, so that reading one that no token owns shows."""
    pool = prefixkit.kv_pool(1, KV_HEADS, DIM, num_pages, page_size, dtype=dtype, device=device)
    for pages in pool.pages(0):
        pages.copy_(torch.full(pages.shape[-1:], torch.nan).to(dtype))
    return pool


@cache
def kv_after(prefix: tuple[int, ...]) -> Tensor:
    """``[2, KV_HEADS, DIM]`` K and V of the last of these tokens."""
    numbers = np.random.default_rng(prefix).standard_normal((2, KV_HEADS, DIM), dtype=np.float32)
    return torch.from_numpy(numbers)


@dataclass
class OwnModel:
    """Runs steps of one attention layer."""

    attention: TreeAttention
    rng: np.random.Generator

    def run(self, step: TreeStep, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """Append and attend: q, out and lse of each sequence's last token."""
        spec, q = self.attention.pool.spec, self.random(step.num_rows, HEADS)
        prefix_of = {
            slot: tuple(sequence.tokens()[: at + 1].tolist())
            for sequence in sequences
            for at, slot in enumerate(sequence.slots().tolist())
        }
        # Of tokens that have KV, which is not written again, others.
        kv = torch.stack([kv_after(prefix_of.get(slot, (99,))) for slot in step.slots.tolist()])
        prefixkit.append(step, 0, *kv.to(spec.compute_dtype).to(spec.device).unbind(1))
        out, lse = prefixkit.attend(step, 0, q)
        assert out.dtype == spec.compute_dtype and lse.dtype == torch.float32
        return q[step.last_rows], out[step.last_rows], lse[step.last_rows]

    def seen_by(self, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        """K and V ``[heads, tokens, DIM]`` of a sequence."""
        spec = self.attention.pool.spec
        found = torch.stack([kv_after(tuple(tokens[: end + 1].tolist())) for end in range(len(tokens))])
        k, v = found.permute(1, 2, 0, 3).repeat_interleave(HEADS // KV_HEADS, 1).to(spec.compute_dtype)
        k, v = (of.to(spec.dtype).to(spec.compute_dtype).to(spec.device) for of in (k, v))  # as the pool holds them
        return k, v

    def random(self, rows: int, heads: int) -> Tensor:
        spec, numbers = self.attention.pool.spec, self.rng.standard_normal((rows, heads, DIM), dtype=np.float32)
        return torch.from_numpy(numbers).to(spec.compute_dtype).to(spec.device)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """``[ways, heads, DIM]`` torch's attention of one query: by itself and as one of many rows, keys in four orders.

    Its kernels for one row and for many round differently, a step over a tree calls both, and the largest error of few
    rows is chance.
    """
    found, generator = [], torch.Generator().manual_seed(0)
    shuffled = (torch.randperm(k.shape[1], generator=generator) for _ in range(3))
    for order in (torch.arange(k.shape[1]), *shuffled):
        own = None if bias is None else bias[..., order]
        for rows in (1, k.shape[1]):
            row = q[:, None].repeat(1, rows, 1)
            found.append(scaled_dot_product_attention(row, k[:, order], v[:, order], own, scale=scale)[:, -1])
    return torch.stack(found)


@dataclass
class Errors:
    """Largest errors of ours and of torch's own attention on the same numbers, in the same dtype."""

    ours: float = 0.0
    theirs: float = 0.0
    lse: float = 0.0

    def add(self, model: OwnModel, tokens: np.ndarray, q: Tensor, out: Tensor, lse: Tensor) -> None:
        """One sequence's last query, ``[heads, DIM]``, and what came of it."""
        k, v = model.seen_by(tokens)
        score = torch.einsum("hd,hnd->hn", q.double(), k.double()) / math.sqrt(DIM)
        exact = torch.einsum("hn,hnd->hd", score.softmax(-1), v.double())
        self.add_numbers((out, lse), (exact, score.logsumexp(-1)), torch_attention(q, k, v))

    def add_numbers(self, ours: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], theirs: Tensor) -> None:
        """Our ``out`` and ``lse``, the exact ones, and ``out`` in torch's ways."""
        self.ours = max(self.ours, float((ours[0].double() - exact[0]).abs().max()))
        self.theirs = max(self.theirs, float((theirs.double() - exact[0]).abs().max()))
        self.lse = max(self.lse, float((ours[1].double() - exact[1]).abs().max()))

    def check(self, lse: float = 1e-5) -> None:
        """``lse``: the largest error that the log-sum-exps may have."""
        assert 0 < self.ours <= 1.5 * self.theirs, self
        assert self.lse <= lse, self
