"""Functions are traced into expressions; what expressions cannot say is refused, by its name and line."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prefixkit.attention.variants import UntraceableVariant, register, variant
from prefixkit.attention.variants.evaluate import evaluate, pointwise
from prefixkit.attention.variants.tracing.trace import MASK_MOD, SCORE_MOD, trace


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


TABLE, LENGTH = torch.zeros(3, 4), torch.tensor(3)
BYTES = torch.tensor([200, 100, 7, 0], dtype=torch.uint8)


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
        (
            lambda b, h, q, kv: TABLE.exp()[h, q] > 0,
            r"'exp' computes a tensor .*torch.exp\(table\[h\]\)",
            "TABLE.exp()",
        ),
        (lambda b, h, q, kv: (TABLE * 1.0)[h][q] > 0, "'mul' computes a tensor from a captured one", "TABLE * 1.0"),
        (lambda b, h, q, kv: TABLE.half().T[h, q] > 0, "'half' computes a tensor", "TABLE.half().T"),
        (
            lambda b, h, q, kv: TABLE.to(q.dtype)[h, q] > 0,
            r"'to' takes single numbers, and .* index it first, as in table\[h\].to\(score.dtype\)",
            "TABLE.to(q.dtype)",
        ),
        (lambda b, h, q, kv: torch.full_like(BYTES, LENGTH)[h] > q, "'full_like' computes a tensor", "LENGTH)[h]"),
        (lambda b, h, q, kv: q - kv < LENGTH + 1, "'add' computes a tensor", "LENGTH + 1"),
        (lambda b, h, q, kv: q - kv < LENGTH.data, "'data' computes a tensor", "LENGTH.data"),
        (lambda b, h, q, kv: q - kv < int(LENGTH), "reads numbers of a captured tensor", "int(LENGTH)"),
        (lambda b, h, q, kv: (q > kv) - 1 > 0, "'sub' takes no operands of type bool, int", "(q > kv) - 1"),
        (lambda b, h, q, kv: -(q > kv) < 0, "'neg' takes no operands of type bool", "-(q > kv)"),
        (lambda b, h, q, kv: abs(q > kv) < 1, "'abs' takes no operands of type bool", "abs(q > kv)"),
        (lambda b, h, q, kv: (q > kv) // (q > 3) < 1, "'floordiv' takes no operands of type bool", "// (q > 3)"),
        (lambda b, h, q, kv: q**kv > 3, "integers are raised to literal exponents from 0 to 16", "q**kv"),
        (lambda b, h, q, kv: 2**q > 3, "write 1 << n for 2", "2**q"),
        (lambda b, h, q, kv: q**-1 > 3, "literal exponents from 0 to 16", "q**-1"),
        (lambda b, h, q, kv: BYTES[h].clamp(max=300) > 3, "takes no literal 300, which is out of its range", "max=300"),
        (lambda b, h, q, kv: torch.add(q, kv, alpha=2) > 3, "'add' is taken with the operands input, other", "alpha=2"),
        (
            lambda b, h, q, kv: torch.round(q / 3, decimals=1) > 3,
            "'round' is taken with the operands input",
            "decimals",
        ),
        (lambda b, h, q, kv: q.type_as(q, kv) > kv, "'type_as' is taken with the operands input, other", "type_as"),
        (lambda b, h, q, kv: q.to(torch.complex64) == kv, "do not compute in torch.complex64", "complex64"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_its_line(function: Any, reason: str, line: str) -> None:
    with pytest.raises(UntraceableVariant, match=reason) as refused:
        variant(mask_mod=function)
    assert line in str(refused.value) and "test_trace.py:" in str(refused.value)
    assert "traced=False" in str(refused.value)


WRITES: dict[str, Any] = {
    "copy_": lambda mine: mine.copy_(TABLE[0]),
    "__setitem__": lambda mine: mine.__setitem__(1, TABLE[0, 1]),
    "add": lambda mine: torch.add(TABLE[0], 1, out=mine),
    "__set__": lambda mine: setattr(mine, "data", TABLE[0]),
    "mul_": lambda mine: mine[1:].mul_(TABLE[0, 1:]),
}


@pytest.mark.parametrize("name", WRITES)
def test_numbers_of_a_captured_tensor_that_are_written_to_another_one_are_refused(name: str) -> None:
    """They would not follow later changes."""

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        mine = torch.ones_like(TABLE[0])
        WRITES[name](mine)
        return s + mine[h]

    with pytest.raises(UntraceableVariant, match=f"'{name}' computes a tensor from a captured one"):
        variant(mod)


SAME: dict[str, Any] = {
    "where as a method": lambda s, b, h, q, kv: s.where(q - kv < 3, s - 50),
    "where by keywords": lambda s, b, h, q, kv: torch.where(condition=q > kv, input=s, other=-s),
    "exclusive or": lambda s, b, h, q, kv: s + torch.logical_xor(input=q > kv, other=h),
    "fills by keywords": lambda s, b, h, q, kv: (
        s.masked_fill(mask=q < kv, value=0.0) + s.new_full(size=(), fill_value=3)
    ),
    "likes by keywords": lambda s, b, h, q, kv: s + torch.full_like(s, fill_value=3.0) * torch.ones_like(input=q),
    "powers by keywords": lambda s, b, h, q, kv: torch.pow(s, exponent=2) + torch.square(input=s) + kv.pow(exponent=3),
    "bounds by keywords": lambda s, b, h, q, kv: torch.clamp(input=s, min=0) + q.clamp(max=5) + torch.tanh(input=s),
    "logic by keywords": lambda s, b, h, q, kv: s * torch.logical_and(input=q > kv, other=h),
    "integer powers": lambda s, b, h, q, kv: s + (kv**5) % 7 + ((q + 900) ** 6) % 11 + q**0 + (q > kv) ** 2,
    "or and and": lambda s, b, h, q, kv: s + ((q > kv) + (q > 5)) * 2 + (q > kv) * (q > 5) * 1.5,
    "bytes": lambda s, b, h, q, kv: s + (BYTES[h] - BYTES[kv % 4]) + BYTES[h] * 3 + BYTES[h] // -2 - BYTES[h] % -3,
    "bytes and positions": lambda s, b, h, q, kv: s + (BYTES[h] - q) + BYTES[h].clamp(min=q) + BYTES[h].long() * 300,
    "compared bytes": lambda s, b, h, q, kv: (
        s + (BYTES[h] < 300) + (BYTES[h] == -56) + torch.where(q > kv, BYTES[h], 9)
    ),
    "no numbers": lambda s, b, h, q, kv: torch.minimum(s.log(), s) + torch.maximum(s.log(), s) + s.sqrt().clamp(-1, 1),
    "rounded integers": lambda s, b, h, q, kv: s + torch.floor(q) // 2 + torch.round(kv),
    "its own constant": lambda s, b, h, q, kv: s + (torch.arange(4) * 2.0)[h],
    "shapes of captured tensors": lambda s, b, h, q, kv: (
        s + torch.ones_like(input=BYTES)[h] + TABLE.new_zeros(4)[h] + torch.full_like(TABLE, fill_value=2.0)[kv % 3, h]
    ),
    "another value's dtype": lambda s, b, h, q, kv: s + BYTES[h].to(s) / 3 + s.to(TABLE[0, h]),
    "views": lambda s, b, h, q, kv: s + TABLE.T[h][kv % 3] + BYTES[1:][kv % 3] + LENGTH,
}


@pytest.mark.parametrize("name", SAME)
def test_an_expression_does_what_the_function_does(name: str) -> None:
    at = (torch.zeros(1, dtype=torch.int64), torch.arange(4)[:, None, None], torch.arange(9)[:, None], torch.arange(7))
    score = 5 * torch.randn(4, 9, 7)
    found = evaluate(trace(SAME[name], SCORE_MOD), **dict(zip(SCORE_MOD, (score, *at), strict=True)))
    torch.testing.assert_close(found.expand(score.shape), pointwise(SAME[name], score, *at), equal_nan=True)


def test_a_view_of_a_captured_tensor_follows_its_changes() -> None:
    table = torch.zeros(8)
    of = variant(lambda s, b, h, q, kv: s + table[4:].view(4)[h])
    before, one = of.versions, torch.zeros(1, dtype=torch.int64)
    table.fill_(2.0)
    assert of.versions != before and of.change(torch.ones(1), one, one, one, one).tolist() == [3.0]


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.arange(4.0))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + self.by[h]


def test_parameters_are_captured_as_tensors_are_and_modules_are_called() -> None:
    module = Shift()
    zero = torch.zeros(1, dtype=torch.int64)
    for function in (module, lambda s, b, h, q, kv: s + module.by[h]):
        of = variant(function)
        before = of.versions
        assert [each.tensor is module.by for each in of.captured] == [True]
        found = of.change(torch.zeros(1), zero, torch.arange(4), zero, zero)
        assert torch.equal(found, module.by.detach()) and not found.requires_grad
        with torch.no_grad():
            module.by.add_(1)
        assert of.versions != before


class Unknown:
    def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.special.erf(s)


def test_the_remedy_for_an_object_is_a_plain_function_that_is_not_traced() -> None:
    with pytest.raises(UntraceableVariant, match="write a plain function that captures what the Unknown holds"):
        variant(Unknown())
    with pytest.raises(UntraceableVariant, match="or pass traced=False"):
        variant(lambda s, b, h, q, kv: torch.special.erf(s))
    register(variant(lambda s, b, h, q, kv: torch.special.erf(s), traced=False))
