"""Ops that take layers' states further: what they compute, where they write, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import prefixkit.backends  # noqa: F401  (registers them)
from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape
from prefixkit.ops.library import NoBackward
from tests.ops.state_steps import (
    DRAWS,
    Step,
    conv_arguments,
    conv_by_torch,
    conv_oracle,
    delta_arguments,
    delta_by_torch,
    delta_oracle,
    mamba2_arguments,
    mamba2_by_torch,
    mamba2_oracle,
    norm_oracle,
)

ops = torch.ops.prefixkit
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
CONV = ("x", "weight", "bias", "states", "source", "target")
DELTA = ("query", "key", "value", "decay", "beta", "normalize", "states", "source", "target")
MAMBA2 = ("x", "dt", "rate", "inward", "outward", "skip", "bias", "gate", "states", "source", "target")


@pytest.fixture
def generator() -> torch.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def names(given: list[Any]) -> tuple[str, ...]:
    return next(of for of in (CONV, DELTA, MAMBA2) if len(of) == len(given))


def at(given: list[Any], name: str) -> Any:
    return given[names(given).index(name)]


@DTYPES
@pytest.mark.parametrize(("width", "bias", "silu"), [(4, True, True), (3, False, True), (2, True, False)])
def test_a_convolution_takes_a_token_and_errs_no_more_than_torchs(dtype, width, bias, silu, generator):
    ours, torchs = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(DRAWS):
        given = conv_arguments(generator, dtype, width=width, bias=bias)
        exact, by_torch, target = conv_oracle(given, silu), conv_by_torch(given, silu), at(given, "target")
        out = ops.conv_step(*given, silu)
        assert out.dtype == dtype and out.shape == exact.out.shape and out.is_contiguous()
        ours += Step(out.double(), at(given, "states").double()).errors(exact, target)
        torchs += by_torch.errors(exact, target)
    assert (ours <= 1.5 * torchs).all(), (ours, torchs)


@DTYPES
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gate": True, "groups": 4},
        {"skip": False, "bias": False, "groups": 1},
        {"weights": torch.float32, "heads": 6, "dim": 3, "size": 5},
    ],
    ids=["plain", "gate", "no weights", "float32 weights"],
)
def test_a_recurrence_takes_a_token_and_errs_no_more_than_torchs(dtype, changes, generator):
    ours, torchs = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(DRAWS):
        given = mamba2_arguments(generator, dtype, **changes)
        exact, by_torch, target = mamba2_oracle(given), mamba2_by_torch(given), at(given, "target")
        out = ops.mamba2_step(*given)
        assert out.dtype == dtype and out.shape == exact.out.shape and out.is_contiguous()
        ours += Step(out.double(), at(given, "states").double()).errors(exact, target)
        torchs += by_torch.errors(exact, target)
    assert (ours <= 1.5 * torchs).all(), (ours, torchs)


@DTYPES
@pytest.mark.parametrize(
    "changes", [{}, {"tokens": 1, "key_heads": 4, "normalize": False}, {"tokens": 19, "rows": 3}], ids=str
)
def test_a_delta_rule_takes_tokens_and_errs_no_more_than_torchs(dtype, changes, generator):
    ours, torchs = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(DRAWS):
        given = delta_arguments(generator, dtype, **changes)
        exact, by_torch, target = delta_oracle(given), delta_by_torch(given), at(given, "target")
        out = ops.delta_rule(*given)
        assert out.dtype == dtype and out.shape == exact.out.shape and out.is_contiguous()
        ours += Step(out.double(), at(given, "states").double()).errors(exact, target)
        torchs += by_torch.errors(exact, target)
    assert (ours <= 1.5 * torchs).all(), (ours, torchs)


@DTYPES
@pytest.mark.parametrize(("gated", "offset"), [(True, 0.0), (False, 1.0)])
def test_a_norm_errs_no_more_than_torchs(dtype, gated, offset, generator):
    x, gate = (torch.randn(40, 3, 64, generator=generator).to(dtype)[:, 1:] for _ in range(2))
    weight, gate = torch.randn(64, generator=generator).to(dtype), gate if gated else None
    exact = norm_oracle(x, weight, gate, 1e-5, offset)
    by_torch = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    by_torch = by_torch * (offset + weight.float()) if offset else weight * by_torch.to(dtype)
    by_torch = (by_torch if gate is None else by_torch * torch.nn.functional.silu(gate.float())).to(dtype)
    out = ops.rms_norm(x, weight, gate, 1e-5, offset)
    assert out.dtype == dtype and out.shape == x.shape and out.is_contiguous()
    assert (out.double() - exact).abs().sum() <= 1.5 * (by_torch.double() - exact).abs().sum()


def test_what_does_not_fit_a_norm_is_refused():
    x, weight = torch.zeros(2, 8), torch.ones(8)
    for given, error, message in (
        ((x.int(), weight, None), BadDtype, "x must be torch.float32"),
        ((x, weight[:7], None), BadShape, r"weight must have shape \[8\]"),
        ((x, weight, x.half()), BadDtype, "gate must be torch.float32 like x"),
    ):
        with pytest.raises(error, match=message):
            ops.rms_norm(*given, 1e-6, 0.0)


def test_rows_of_large_states_are_taken_one_at_a_time(generator):
    given = mamba2_arguments(generator, torch.float32, heads=64, dim=33, size=128)
    exact, by_torch, target = mamba2_oracle(given), mamba2_by_torch(given), at(given, "target")
    out = ops.mamba2_step(*given).double()
    ours = Step(out, at(given, "states").double()).errors(exact, target)
    assert (ours <= 1.5 * by_torch.errors(exact, target)).all(), (ours, by_torch.errors(exact, target))


def test_gradients_are_refused(generator):
    for given, op, more in (
        (conv_arguments(generator, torch.float32), ops.conv_step, (True,)),
        (mamba2_arguments(generator, torch.float32), ops.mamba2_step, ()),
        (delta_arguments(generator, torch.float32), ops.delta_rule, ()),
    ):
        given[0] = given[0].clone().requires_grad_()
        with pytest.raises(NoBackward, match="no backward"):
            op(*given, *more)
        with torch.no_grad():
            op(*given, *more)


def test_opcheck(generator):
    torch.library.opcheck(ops.conv_step.default, (*conv_arguments(generator, torch.float32), True))
    torch.library.opcheck(ops.mamba2_step.default, tuple(mamba2_arguments(generator, torch.float32, gate=True)))
    torch.library.opcheck(ops.rms_norm.default, (torch.ones(2, 3, 4), torch.ones(4), None, 1e-6, 1.0))
    torch.library.opcheck(ops.delta_rule.default, tuple(delta_arguments(generator, torch.float32)))


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        ([1, 9], [1, 2], IndexError, r"slots of states must be 0..8, .* got sources \[1, 9\]"),
        ([1, -1], [1, 2], IndexError, "targets may be -1"),
        ([1, 2], [1, 9], IndexError, "targets may be -1"),
        ([1, 2], [3, 3], ValueError, r"two rows write one slot: \[3, 3\]"),
        ([1, 2], [2, 1], ValueError, "a row writes a slot that another one reads"),
        ([1, 1], [1, 2], ValueError, "a row writes a slot that another one reads"),
    ],
)
def test_slots_that_meet_or_do_not_exist_are_refused_before_anything_is_written(
    source, target, error, message, generator
):
    for given, op, more in (
        (conv_arguments(generator, torch.float32, 2), ops.conv_step, (True,)),
        (mamba2_arguments(generator, torch.float32, 2), ops.mamba2_step, ()),
        (delta_arguments(generator, torch.float32, 2), ops.delta_rule, ()),
    ):
        given[-2:] = torch.tensor(source), torch.tensor(target)
        before = at(given, "states").clone()
        with pytest.raises(error, match=message):
            op(*given, *more)
        assert torch.equal(at(given, "states"), before)


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("x", torch.zeros(6, 300, 1), BadShape, r"x must have shape \[B, channels\]"),
        ("weight", torch.zeros(299, 4), BadShape, r"weight must have shape \[300, width\]"),
        ("weight", torch.zeros(300, 4).bfloat16(), BadDtype, "weight must be torch.float32 like x"),
        ("bias", torch.zeros(300, 1), BadShape, r"bias must have shape \[300\]"),
        ("states", torch.zeros(9, 300, 3), BadShape, r"states must have shape \[slots, 300, 4\]"),
        ("source", torch.zeros(6, dtype=torch.int32), BadDtype, "source must be torch.int64"),
        ("target", torch.zeros(5, dtype=torch.int64), BadShape, r"target must have shape \[6\]"),
    ],
)
def test_what_does_not_fit_a_convolution_is_refused(name, wrong, error, message, generator):
    given = conv_arguments(generator, torch.float32)
    given[CONV.index(name)] = wrong
    with pytest.raises(error, match=message):
        ops.conv_step(*given, True)


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("x", torch.zeros(6, 40), BadShape, r"x must have shape \[B, heads, head_dim\]"),
        ("dt", torch.zeros(6, 3), BadShape, r"dt must have shape \[6, 4\]"),
        ("rate", torch.zeros(4).double(), BadDtype, "rate must be torch.float32"),
        ("inward", torch.zeros(6, 3, 16), BadShape, r"inward must have shape \[6, a divisor of 4, state_size\]"),
        ("outward", torch.zeros(6, 1, 16), BadShape, r"outward must have shape \[6, 2, 16\]"),
        ("skip", torch.zeros(4, 1), BadShape, r"skip must have shape \[4\]"),
        ("bias", torch.zeros(4, dtype=torch.int64), BadDtype, "bias must be torch.float32 or"),
        ("gate", torch.zeros(6, 4, 10, device="meta"), BadDevice, "gate is on meta"),
        ("states", torch.zeros(9, 4, 10, 16).bfloat16(), BadDtype, "states must be torch.float32"),
        ("states", torch.zeros(9, 4, 16, 10).mT, BadShape, "states must have shape .* contiguous"),
    ],
)
def test_what_does_not_fit_a_recurrence_is_refused(name, wrong, error, message, generator):
    given = mamba2_arguments(generator, torch.float32)
    given[MAMBA2.index(name)] = wrong
    with pytest.raises(error, match=message):
        ops.mamba2_step(*given)


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("value", torch.zeros(5, 3, 24), BadShape, r"value must have shape \[B, tokens, heads, V\]"),
        ("key", torch.zeros(5, 3, 3, 10), BadShape, r"key must have shape \[5, 3, a divisor of 4, K\]"),
        ("key", torch.zeros(5, 3, 2, 10).half(), BadDtype, "key must be torch.float32 like value"),
        ("query", torch.zeros(5, 3, 4, 10), BadShape, r"query must have shape \[5, 3, 2, 10\]"),
        ("decay", torch.zeros(5, 3, 4).half(), BadDtype, "decay must be torch.float32"),
        ("beta", torch.zeros(5, 4), BadShape, r"beta must have shape \[5, 3, 4\]"),
        ("states", torch.zeros(9, 4, 6, 10), BadShape, r"states must have shape \[slots, 4, 10, 6\]"),
    ],
)
def test_what_does_not_fit_a_delta_rule_is_refused(name, wrong, error, message, generator):
    given = delta_arguments(generator, torch.float32)
    given[DELTA.index(name)] = wrong
    with pytest.raises(error, match=message):
        ops.delta_rule(*given)
