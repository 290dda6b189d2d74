"""States merge exactly: parts of the keys merged equal all the keys at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from prefixkit.attention.state import State, empty_state, merge


def attend(score: Tensor, v: Tensor) -> State:
    """``score [rows, heads, len]``, ``v [len, heads, head_dim]``."""
    return State(torch.einsum("rhl,lhd->rhd", score.softmax(-1), v), score.logsumexp(-1))


@pytest.fixture
def whole() -> tuple[Tensor, Tensor]:
    return 5 * torch.randn(7, 3, 40, dtype=torch.float64), torch.randn(40, 3, 8, dtype=torch.float64)


def test_merged_parts_equal_the_whole(whole: tuple[Tensor, Tensor]) -> None:
    score, v = whole
    parts = [attend(score[..., a:b], v[a:b]) for a, b in ((0, 1), (1, 30), (30, 40))]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        merged = merge(merge(parts[order[0]], parts[order[1]]), parts[order[2]])
        torch.testing.assert_close(merged.out, attend(*whole).out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(merged.lse, attend(*whole).lse, rtol=1e-12, atol=1e-12)


def test_an_empty_state_changes_nothing() -> None:
    state = State(torch.randn(5, 2, 8), 30 * torch.randn(5, 2))
    empty = empty_state(5, 2, 8)
    for merged in (merge(state, empty), merge(empty, state)):
        assert torch.equal(merged.out, state.out)
        assert torch.equal(merged.lse, state.lse)


def test_empty_and_empty_is_empty_not_nan() -> None:
    merged = merge(empty_state(4, 2, 8), empty_state(4, 2, 8))
    assert torch.equal(merged.out, torch.zeros(4, 2, 8))
    assert torch.equal(merged.lse, torch.full((4, 2), -math.inf))


def test_the_logarithm_is_natural() -> None:
    """Two equal keys of score 0: lse is log(2), and the output their mean."""
    one = State(torch.ones(1, 1, 4), torch.zeros(1, 1))
    other = State(3 * torch.ones(1, 1, 4), torch.zeros(1, 1))
    merged = merge(one, other)
    torch.testing.assert_close(merged.lse, torch.full((1, 1), math.log(2)))
    torch.testing.assert_close(merged.out, 2 * torch.ones(1, 1, 4))


def test_huge_scores_do_not_overflow() -> None:
    one, other = (State(torch.full((1, 1, 4), value), torch.full((1, 1), 3e4)) for value in (1.0, 2.0))
    assert torch.equal(merge(one, other).out, torch.full((1, 1, 4), 1.5))
