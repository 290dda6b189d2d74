"""Which pieces of work share a kernel call.

A call costs some 20 us before its first multiplication, so small pieces are batched: gathered into one padded block of
shape ``[batch, length]`` keys for ``[batch, rows]`` queries.  Large pieces are called alone, and read the pool where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixkit.backends.torch.pieces import DENSE, MASKED, SQUARE, Array, Pieces
from prefixkit.backends.torch.tuning import Tuning


@dataclass(frozen=True)
class Heads:
    """The heads of a layer, and what work on them costs where it runs."""

    heads: int
    kv_heads: int
    head_dim: int
    tuning: Tuning

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_elements(self) -> int:
        """Elements of one token's K."""
        return self.kv_heads * self.head_dim

    @property
    def longest_copy(self) -> int:
        """Tokens from which on copying K and V costs more than one more call."""
        return max(1, int(self.tuning.call_us / (self.tuning.copy_us * self.kv_elements)))

    @property
    def score_us(self) -> float:
        """Arithmetic of one query with one key, over all heads."""
        return 2 * self.heads * self.head_dim * self.tuning.multiply_us

    def numbers(self, device: torch.device | str = "cpu") -> Tensor:
        """``[heads, 1, 1]`` int64, for variants."""
        return torch.arange(self.heads, device=device)[:, None, None]


def batches(pieces: Pieces, heads: Heads, scored: bool) -> Iterator[Array]:
    """Which pieces share a call: arrays of piece numbers, each piece once, those of a batch ascending by row.

    ``scored`` says that scores or masks take memory: see ``Tuning.scored_rows``.
    """
    tuning = heads.tuning
    tokens, rows = pieces.tokens, pieces.rows
    single_run = np.diff(pieces.indptr) == 1
    square = pieces.kind == SQUARE
    alone = (
        (single_run & (tokens > heads.longest_copy))
        | (rows * tokens * heads.score_us > 10 * tuning.call_us)
        | (pieces.kind == MASKED)
        | (square & (tokens != rows))
    )
    for piece in np.flatnonzero(alone):
        yield np.array([piece])
    for kind in (DENSE, SQUARE):
        candidates = np.flatnonzero(~alone & (pieces.kind == kind))
        for members in _buckets(rows[candidates], tokens[candidates], heads):
            batch = candidates[members]
            batch = batch[np.argsort(pieces.row[batch], kind="stable")]
            longest, most = int(tokens[batch].max()), int(rows[batch].max())
            limit = tuning.batch_elements // (longest * heads.kv_elements)
            if scored:
                limit = min(limit, tuning.call_elements // (most * longest * heads.heads))
            yield from np.array_split(batch, -(-len(batch) // max(1, limit)))


def _buckets(rows: Array, tokens: Array, heads: Heads) -> list[Array]:
    """Group blocks of similar shape: a block joins a larger bucket while padding it costs less than one more call."""
    if not len(rows):
        return []
    tuning = heads.tuning
    # As one number per block, rows above tokens.
    shapes, which, count = np.unique(_round_up(rows) << 32 | _round_up(tokens), return_inverse=True, return_counts=True)
    token_us = heads.kv_elements * (tuning.copy_us + tuning.read_us)
    leaders: list[tuple[int, int]] = []
    bucket_of_shape = np.zeros(len(shapes), dtype=np.int64)
    for index in range(len(shapes) - 1, -1, -1):
        r, n = divmod(int(shapes[index]), 1 << 32)
        best, best_cost = -1, tuning.call_us
        for number, (big_r, big_n) in enumerate(leaders):
            padding_us = int(count[index]) * ((big_r * big_n - r * n) * heads.score_us + (big_n - n) * token_us)
            if big_r >= r and big_n >= n and padding_us < best_cost:
                best, best_cost = number, padding_us
        if best < 0:
            best = len(leaders)
            leaders.append((r, n))
        bucket_of_shape[index] = best
    bucket = bucket_of_shape[which]
    return [np.flatnonzero(bucket == number) for number in range(len(leaders))]


def _round_up(sizes: Array) -> Array:
    """Up to the next of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...: at most a quarter more."""
    step = 1 << np.maximum(np.frexp(np.maximum(sizes, 1) - 0.5)[1] - 3, 0).astype(np.int64)
    rounded: Array = -(-sizes // step) * step
    return rounded
