"""Random variants: compositions of the operations of traced functions.

One seed determines the structure, the operations; another determines the numbers and captured tensors that they work
on.  Variants of one structure have the same code, and run in the same kernel.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from prefixkit.attention.variants import Variant, attention_sinks, compose, variant
from prefixkit.testing.forests import Case

# A function of b, h, q_idx and kv_idx; a score function takes the score before these.
Function = Callable[..., Any]
LONGEST = 5000


def random_variant(structure: int, values: int, sequences: int, heads: int, *, sinks: bool = True) -> Variant:
    """A variant for positions below :data:`LONGEST`: a mask, scores, or both, causal or not.

    Args:
        structure: Seed of the operations.
        values: Seed of the numbers and tensors.
        sequences, heads: Number of sequences and heads for which captured tensors have values.
        sinks: Whether some structures have sinks.
    """
    shape = random.Random(structure)
    make = _Maker(shape, random.Random(values), torch.Generator().manual_seed(values), sequences, heads)
    kind = shape.choice(("mask", "score", "both", "both"))
    score = make.score() if kind != "mask" else None
    mask = make.mask() if kind != "score" else None
    made = variant(
        None if score is None else lambda s, b, h, q_idx, kv_idx: score(s, b, h, q_idx, kv_idx),
        None if mask is None else lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx),
        name=f"random {structure}/{values}",
    )
    return compose(made, attention_sinks()) if sinks and shape.random() < 0.2 else made


def fitting(rng: np.random.Generator, case: Case, of: Variant, sequences: int) -> Case:
    """The case with sequence numbers; if the variant looks ahead, all tokens have KV, which attention then needs."""
    if of.looks_ahead:
        case.snapshot.computed[:] = case.snapshot.length
    numbers = rng.integers(0, sequences, len(case.queries.node)).astype(np.int32)
    return replace(case, queries=replace(case.queries, sequence=numbers))


class _Maker:
    """Draws functions: ``shape`` chooses the operations, ``values`` and ``generator`` their operands."""

    def __init__(
        self, shape: random.Random, values: random.Random, generator: torch.Generator, sequences: int, heads: int
    ) -> None:
        self.shape, self.values = shape, values
        self.table = torch.randint(-9, 9, (sequences, LONGEST), generator=generator)
        self.per_head = torch.randn(heads, generator=generator)
        self.halves = torch.randn(heads, 64, generator=generator).to(torch.bfloat16)

    def whole(self, depth: int) -> Function:
        """A function with integer values."""
        if depth == 0:
            return self._leaf()
        x, y = self.whole(depth - 1), self.whole(depth - 1)
        by = self.shape.choice((1, 1, -1)) * self.values.choice([2, 3, 5, 17, 64])  # the sign is part of the code
        return self.shape.choice(
            [
                lambda *at: x(*at) + y(*at),
                lambda *at: x(*at) - y(*at),
                lambda *at: x(*at) // by,
                lambda *at: x(*at) % by,
                lambda *at: torch.minimum(x(*at), y(*at)),
                lambda *at: torch.where(x(*at) > y(*at), x(*at), y(*at) * by),
                lambda *at: x(*at).abs(),
                lambda *at: (x(*at) ^ y(*at)) & 63,
            ]
        )

    def _leaf(self) -> Function:
        number = self.values.choice((1, -1)) * self.values.randint(1, 40)  # not 0: kv <= q + 0 has the code of causal
        table = self.table
        return self.shape.choice(
            [
                lambda b, h, q, kv: q,
                lambda b, h, q, kv: kv,
                lambda b, h, q, kv: h,
                lambda b, h, q, kv: b + number,
                lambda b, h, q, kv: table.to(kv.device)[b, kv],
                lambda b, h, q, kv: q + number,
                lambda b, h, q, kv: q - kv,
            ]
        )

    def truth(self) -> Function:
        x, y, more = self.whole(self.shape.randint(0, 3)), self.whole(self.shape.randint(0, 3)), self.whole(1)
        size, parts = self.values.randint(2, 30), self.values.randint(2, 5)  # not 1, which is the code of causal
        return self.shape.choice(
            [
                lambda *at: x(*at) <= y(*at),
                lambda *at: (x(*at) != y(*at)) | (more(*at) > 3),
                lambda *at: ~(x(*at) == y(*at)) & (more(*at) % parts == 0),
                lambda b, h, q, kv: (q - kv < size) | (x(b, h, q, kv) > y(b, h, q, kv)),
                lambda b, h, q, kv: (q - kv).abs() < size,
                lambda b, h, q, kv: q // size == kv // size,
                lambda *at: more(*at) % parts != 0,
            ]
        )

    def mask(self) -> Function:
        """A mask, causal or not; some masks hide every key from some queries."""
        one, other = self.truth(), self.truth()
        return self.shape.choice(
            [
                one,
                lambda b, h, q, kv: one(b, h, q, kv) & (kv <= q),
                lambda b, h, q, kv: (q >= kv) & (one(b, h, q, kv) | other(b, h, q, kv)),
                lambda b, h, q, kv: one(b, h, q, kv) & other(b, h, q, kv) & (q - kv >= 0),
                lambda b, h, q, kv: (kv <= q) | one(b, h, q, kv),
            ]
        )

    def score(self) -> Function:
        x, y, factor = self.whole(self.shape.randint(0, 2)), self.whole(1), self.values.uniform(-2, 2)
        per_head, halves, slope = self.per_head, self.halves, self.values.uniform(0, 0.1)
        cap = self.values.uniform(1, 40)
        first: Function = self.shape.choice(
            [
                lambda s, *at: s + factor * torch.tanh(x(*at) / 9),
                lambda s, b, h, q, kv: s + per_head.to(s.device)[h] * (kv - q) * slope,
                lambda s, b, h, q, kv: s - halves.to(s.device)[h, (q - kv) % 64],
                lambda s, *at: torch.where(x(*at) > y(*at), s * factor, s + per_head.to(s.device)[at[1]]),
                lambda s, *at: torch.tanh(s / cap) * cap,
                lambda s, *at: s * torch.sigmoid(per_head.to(s.device)[at[1]]) + slope * y(*at).clamp(-50, 50),
                lambda s, *at: torch.maximum(s, -torch.log1p(s.abs())),
                lambda s, *at: s / torch.sqrt(1 + s * s * slope),
            ]
        )
        again: list[Function] = [lambda s, *at: cap * torch.tanh(s / cap), lambda s, *at: s + factor]
        second = self.shape.choice([None, None, *again])
        return first if second is None else lambda s, *at: second(first(s, *at), *at)
