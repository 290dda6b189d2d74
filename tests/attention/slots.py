"""What slots may say to the ops that append: one table for every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.attention.rotations import bits, fresh_rng, nan_pages, random_rows

# Of a pool with 8 pages of 4 slots.
NUM_PAGES, PAGE_SIZE = 8, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64

SLOTS = {
    "every row has one": [3, 31, 0],
    "no rows": [],
    "rows that pad a batch come last": [5, 2, -1, -1, -1],
    "rows that pad a batch come first": [-1, -1, 0],
    "the first slot, the last, and padding between": [0, -1, 31, -1, 30],
    "padding and slot 0": [-1, 0, -1],
    "padding only": [-1, -1],
    "one row of padding": [-1],
}
# What no row may say; the rows with 7 and 9 are good.
WRONG = {
    "one past the last": [7, 32, 9],
    "below -1": [7, -2, 9],
    "beside padding": [7, -1, 33, 9],
    "the pool's size below 0": [7, -32, 9],
    "equal to a good one in 32 bits": [7, 2**32 + 1, 9],
    "huge": [7, 2**63 - 1, 9],
    "as low as it gets": [7, -(2**63), 9],
    "no row is good": [32, -3],
}
OPS = ("kv_append", "rotary_append", "index_append")

Append = Callable[..., Any]


class Appended:
    """Pages full of NaN, what an op was asked to append to them, and what it made of the queries."""

    def __init__(
        self, slots: list[int], dtype: torch.dtype = torch.bfloat16, device: str = "cpu", head_major: bool = False
    ) -> None:
        *self.rows, self.cos, self.sin = random_rows(fresh_rng(), dtype, len(slots), HEADS, KV_HEADS, HEAD_DIM, device)
        k, v, _ = nan_pages((NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM), dtype, head_major)
        # Moved as they lie, so that a copy has the strides of the original.
        self.k, self.v = (
            pages.transpose(1, 2).to(device).transpose(1, 2) if head_major else pages.to(device) for pages in (k, v)
        )
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)
        self.rotated: Tensor | None = None

    def by(self, name: str, append: Append) -> None:
        """Run one of the ops; ``index_append`` once for K and once for V."""
        q, key, value = self.rows
        if name == "kv_append":
            append(key, value, self.k, self.v, self.slots)
        elif name == "index_append":
            append(key, self.k, self.slots)
            append(value, self.v, self.slots)
        else:
            self.rotated = append(q, key, value, self.cos, self.sin, self.k, self.v, self.slots)

    def check(self, turned_queries: Tensor, turned_keys: Tensor) -> None:
        """Every row with a slot of the pool is there, and nothing else; all queries are rotated."""
        keys = self.rows[1] if self.rotated is None else turned_keys
        for pages, rows in ((self.k, keys), (self.v, self.rows[2])):
            expected = torch.full((NUM_PAGES * PAGE_SIZE, KV_HEADS, HEAD_DIM), torch.nan, dtype=pages.dtype)
            for row, slot in enumerate(self.slots.tolist()):
                if 0 <= slot < NUM_PAGES * PAGE_SIZE:
                    expected[slot] = rows[row].cpu()
            assert torch.equal(bits(pages.reshape(expected.shape).cpu()), bits(expected))
        if self.rotated is not None:
            assert torch.equal(bits(self.rotated.cpu()), bits(turned_queries.cpu()))

    def nothing_written(self) -> bool:
        return bool(self.k.isnan().all() and self.v.isnan().all())


def rotations(appended: Appended) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated by the op on the CPU, whose numbers have tests of their own."""
    q, key, value = (x.cpu() for x in appended.rows)
    cos, sin = appended.cos.cpu(), appended.sin.cpu()
    somewhere = torch.arange(len(q))
    turned = []
    for x in (q, key):
        k, v, _ = nan_pages((max(len(q), 1), 1, KV_HEADS, HEAD_DIM), x.dtype)
        turned.append(torch.ops.prefixkit.rotary_append(x, key, value, cos, sin, k, v, somewhere))
    return turned[0], turned[1]
