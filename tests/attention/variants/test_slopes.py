"""Which biases are lines, and their slopes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from prefixkit.attention.variants.evaluate import evaluate
from prefixkit.attention.variants.expression import Expression
from prefixkit.attention.variants.slopes import slope_of
from prefixkit.attention.variants.tracing.trace import SCORE_MOD, trace

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
PER_HEAD, TABLE = torch.tensor([0.5, -1.25, 3.0]), torch.randn(16)
LINES: dict[str, ScoreMod] = {
    "alibi": lambda s, b, h, q, kv: s + PER_HEAD[h] * (kv - q),
    "the other way round": lambda s, b, h, q, kv: (q - kv).float() * -PER_HEAD[h] + s,
    "subtracted": lambda s, b, h, q, kv: s - (q - kv + 3) * PER_HEAD[h] - b,
    "of the key alone": lambda s, b, h, q, kv: s + 0.25 * kv,
    "of products": lambda s, b, h, q, kv: s + (kv - q) * PER_HEAD[h] * 0.5 * (b + 1),
    "of the query": lambda s, b, h, q, kv: s + TABLE[q % 16] * (kv.to(torch.float32) + TABLE[b]),
    "whole numbers": lambda s, b, h, q, kv: s - (h + 1) * (q - kv),
}
OTHERS: dict[str, ScoreMod] = {
    "changed": lambda s, b, h, q, kv: 2 * s + 0.5 * kv,
    "the same for all keys": lambda s, b, h, q, kv: s + PER_HEAD[h] * q,
    "distances": lambda s, b, h, q, kv: s - 0.5 * (q - kv).abs(),
    "rounded": lambda s, b, h, q, kv: s + (0.5 * kv).to(torch.bfloat16).float(),
    "cut off": lambda s, b, h, q, kv: s + (0.5 * kv).to(torch.int64),
    "twice": lambda s, b, h, q, kv: s + 0.5 * (kv + kv),
    "squares": lambda s, b, h, q, kv: s + 0.5 * kv * kv,
    "a table": lambda s, b, h, q, kv: s + TABLE[kv % 16],
    "a choice": lambda s, b, h, q, kv: s + torch.where(kv > q, 0.5 * kv, 0.25 * kv),
}


@pytest.mark.parametrize("name", LINES)
def test_a_bias_grows_by_its_slope_from_key_to_key(name: str) -> None:
    score = trace(LINES[name], SCORE_MOD)
    slope = slope_of(score)
    assert slope is not None

    def at(expression: Expression, positions: Tensor, dot: float = 0.0) -> Tensor:
        b, h, q = (torch.arange(size).view(-1, *[1] * dims) for size, dims in ((2, 3), (3, 2), (7, 1)))
        found = evaluate(expression, score=torch.tensor(dot), b=b, h=h, q_idx=q, kv_idx=positions)
        return found.expand(2, 3, 7, 9).float()

    kv = torch.arange(9)
    torch.testing.assert_close(at(score, kv + 1) - at(score, kv), at(slope, kv), rtol=1e-5, atol=1e-5)
    assert torch.equal(at(slope, kv), at(slope, kv + 100, dot=3.0)), "the same for all keys"


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_no_lines(name: str) -> None:
    assert slope_of(trace(OTHERS[name], SCORE_MOD)) is None
