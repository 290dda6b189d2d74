"""Recurrences from a state, against one token after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefixkit.models.states.own_scan import causal_conv, scan, selective_scan

LENGTHS = [1, 2, 3, 4, 5, 7, 16, 17, 31, 100]


def in_turn(decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
    states = []
    for left, more in zip(decay, added, strict=True):
        state = left * state + more
        states.append(state)
    return torch.stack(states)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_scan_is_the_recurrence(tokens: int) -> None:
    torch.manual_seed(tokens)
    decay, added = torch.rand(tokens, 2, 3, dtype=torch.float64), torch.randn(tokens, 2, 3, dtype=torch.float64)
    state = torch.randn(2, 3, dtype=torch.float64)
    torch.testing.assert_close(scan(decay, added, state), in_turn(decay, added, state), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("tokens", [1, 5, 64, 1000])
def test_a_scan_in_float32_is_as_exact_as_the_recurrence(tokens: int) -> None:
    torch.manual_seed(tokens)
    decay, added, state = 1 - torch.rand(tokens, 64) ** 4, torch.randn(tokens, 64), torch.randn(64)
    truth = in_turn(decay.double(), added.double(), state.double())
    mine, theirs = ((run(decay, added, state) - truth).abs() for run in (scan, in_turn))
    assert mine.norm() <= 1.5 * theirs.norm()


def test_a_scan_takes_decays_that_underflow() -> None:
    decay = torch.tensor([1.0, 1e-30, 1e-30, 1.0, 0.0, 1.0, 1.0, 1e-30, 1.0, 1.0])[:, None]
    added = torch.arange(10.0)[:, None]
    assert torch.equal(scan(decay, added, torch.ones(1)), in_turn(decay, added, torch.ones(1)))


def selective_in_turn(
    inputs: Tensor, time_step: Tensor, rate: Tensor, inward: Tensor, outward: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for now in range(inputs.shape[-1]):
        step = time_step[..., now, None]
        state = torch.exp(step * rate) * state + step * inputs[..., now, None] * inward[:, :, None, now]
        outputs.append((state * outward[:, :, None, now]).sum(-1))
    return torch.stack(outputs, -1), state


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_a_selective_scan_in_pieces(tokens: int, groups: int) -> None:
    """The same whether its text runs at once, in pieces of any length, or token by token."""
    torch.manual_seed(tokens)
    batch, channels, size = 3, 5, 4
    shape = (batch, groups, channels, tokens)
    inputs, time_step = torch.randn(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)
    inward, outward = torch.randn(2, batch, groups, tokens, size, dtype=torch.float64)
    rate = -torch.rand(groups, channels, size, dtype=torch.float64)
    start = torch.randn(batch, groups, channels, size, dtype=torch.float64)
    wanted, last = selective_in_turn(inputs, time_step, rate, inward, outward, start)
    for cuts in (
        [tokens],
        [1] * tokens,
        [tokens // 2, tokens - tokens // 2],
        [tokens // 3, 1, tokens - tokens // 3 - 1],
    ):
        outputs, state, first = [], start, 0
        for cut in filter(None, cuts):
            now = slice(first, first + cut)
            out, state = selective_scan(
                inputs[..., now], time_step[..., now], rate, inward[:, :, now], outward[:, :, now], state
            )
            outputs.append(out)
            first += cut
        torch.testing.assert_close(torch.cat(outputs, -1), wanted, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(state, last, rtol=1e-13, atol=1e-13)


def test_a_selective_scan_of_a_state_so_large_that_tokens_take_several_passes() -> None:
    torch.manual_seed(0)
    tokens, channels, size = 20, 2**19, 8  # 8 tokens a pass
    inputs, time_step = torch.randn(1, 1, channels, tokens), torch.rand(1, 1, channels, tokens)
    inward, outward = torch.randn(2, 1, 1, tokens, size)
    rate, start = -torch.rand(1, channels, size), torch.randn(1, 1, channels, size)
    outputs, _ = selective_scan(inputs, time_step, rate, inward, outward, start)
    few = (inputs[:, :, -64:], time_step[:, :, -64:], rate[:, -64:], inward, outward, start[:, :, -64:])
    truth, _ = selective_in_turn(*(each.double() for each in few))
    mine, theirs = ((each - truth).abs() for each in (outputs[:, :, -64:], selective_in_turn(*few)[0]))
    assert mine.norm() <= 1.5 * theirs.norm()


@pytest.mark.parametrize("before", [0, 1, 3, 6])
def test_a_convolution_sees_what_came_before(before: int) -> None:
    torch.manual_seed(0)
    texts, weight, bias = torch.randn(2, 6, 9), torch.randn(6, 1, 4), torch.randn(6)
    whole = causal_conv(texts, weight, bias, 9)
    part = causal_conv(texts[..., max(0, 5 - before) :], weight, bias, 4)
    assert torch.equal(part, whole[..., 5:]) == (before >= 3)
    by_hand = bias + sum(texts[..., 3 - lag] * weight[:, 0, 3 - lag] for lag in range(4))
    torch.testing.assert_close(whole[..., 3], by_hand)
