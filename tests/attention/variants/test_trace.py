"""Functions are traced into expressions; what expressions cannot say is refused, by its name and line."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixkit.attention.variants import UntraceableVariant, variant
from prefixkit.attention.variants.evaluate import evaluate
from prefixkit.attention.variants.trace import MASK_MOD, SCORE_MOD, trace


class Windowed:
    """A callable that is no function."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < self.size


def by_keyword(size: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx - kv_idx < size


@pytest.mark.parametrize("function", [Windowed(3), partial(by_keyword, 3), lambda b, h, q, kv: q - kv < 3])
def test_any_callable_is_traced(function: Any) -> None:
    q, kv = torch.arange(9)[:, None], torch.arange(9)
    none = torch.zeros((), dtype=torch.int64)
    assert torch.equal(evaluate(trace(function, MASK_MOD), b=none, h=none, q_idx=q, kv_idx=kv), q - kv < 3)


def test_literals_and_captured_numbers_are_no_part_of_the_code() -> None:
    def make(size: int, shift: float) -> Any:
        return lambda s, b, h, q, kv: torch.where(q - kv < size, s + shift, -1e4)

    first, second = trace(make(3, 0.5), SCORE_MOD), trace(make(4, 7.5), SCORE_MOD)
    assert first.code == second.code and first.scalars != second.scalars
    assert trace(lambda s, b, h, q, kv: torch.where(q - kv <= 3, s + 0.5, -1e4), SCORE_MOD).code != first.code


def test_captured_tensors_are_parameters_of_their_dtype_and_rank() -> None:
    def make(table: Tensor) -> Any:
        return lambda s, b, h, q, kv: s + table[h, q % 4] - table[h, kv % 4]

    first, longer = (trace(make(torch.randn(size, 4)), SCORE_MOD) for size in (3, 9))
    assert first.code == longer.code and len(first.tensors) == 1
    assert trace(make(torch.randn(3, 4).half()), SCORE_MOD).code != first.code


def test_what_does_not_reach_the_result_is_left_out() -> None:
    table = torch.randn(4)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        table[h] * 2 + b
        return s * 3.0

    found = trace(score_mod, SCORE_MOD)
    assert [node.op for node in found.nodes] == ["argument", "scalar", "mul"] and not found.tensors
    assert found.reads("score") and not any(map(found.reads, MASK_MOD))


def branches(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    if q > 3:
        return kv > 1
    return kv < 1


def loops(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.stack([kv == i for i in range(int(q))]).any()


TABLE = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("function", "reason", "line"),
    [
        (branches, "control flow depends on a value", "if q > 3:"),
        (lambda b, h, q, kv: max(q, 3) > kv, "control flow depends on a value", "max(q, 3)"),
        (loops, "TypeError", "range(int(q))"),
        (
            lambda b, h, q, kv: torch.special.gammaln(q) > kv,
            "'special_gammaln' is not one that kernels support",
            "gammaln",
        ),
        (lambda b, h, q, kv: q.item() > 3, "'item' is not one", "q.item()"),
        (lambda b, h, q, kv: q[0] > kv, "only captured tensors can be indexed", "q[0]"),
        (lambda b, h, q, kv: TABLE[h] > 0, r"shape \[3, 4\] is read with 1 indices", "TABLE[h]"),
        (lambda b, h, q, kv: TABLE[h, q.float()] > 0, "indexed by what is not an integer", "TABLE[h, q.float()]"),
        (lambda b, h, q, kv: q.shape[0] > 3, "attribute 'shape' is not known", "q.shape"),
        (lambda b, h, q, kv: (q / 2) & (kv > 3), "'and' takes no operands of type float", "(q / 2)"),
        (lambda b, h, q, kv: q.to(torch.complex64) == kv, "do not compute in torch.complex64", "complex64"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_its_line(function: Any, reason: str, line: str) -> None:
    with pytest.raises(UntraceableVariant, match=reason) as refused:
        variant(mask_mod=function)
    assert line in str(refused.value) and "test_trace.py:" in str(refused.value)
    assert "traced=False" in str(refused.value)
