"""Layers that keep a state on a GPU: ops of few tokens, decode steps in graphs, forks, calls that go on from calls."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import SamplingParams, Session
from prefixkit.runners.short_steps import USES
from tests.gpu.cases import GPU
from tests.models.states.hybrids import HYBRIDS, VOCAB, assert_logprobs, make_hybrid
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
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture
def generator() -> torch.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def run_and_replay(op: Any, given: list[Any], states: int) -> Step:
    """What an op makes; and a graph of it makes the same of the same states, twice."""
    before = given[states].clone()
    out = op(*given).clone()
    after = given[states].clone()
    given[states].copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = op(*given)
    for _ in range(2):
        given[states].copy_(before)
        graph.replay()
        assert torch.equal(held, out) and torch.equal(given[states][1:], after[1:])
    return Step(out.double().cpu(), after.double().cpu())


@DTYPES
@pytest.mark.parametrize(("width", "channels"), [(4, 10240), (3, 257), (2, 100), (5, 40)])
def test_convolutions_err_no_more_than_torch_and_graphs_hold_them(
    width: int, channels: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    ours, torchs = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(DRAWS):
        given: list[Any] = conv_arguments(generator, dtype, channels=channels, width=width, device=GPU)
        exact, by_torch = conv_oracle(given, True), conv_by_torch(given, True)
        ours += run_and_replay(ops.conv_step, [*given, True], 3).errors(exact, given[-1])
        torchs += by_torch.errors(exact, given[-1])
    assert (ours <= 1.5 * torchs).all(), (ours, torchs)


@DTYPES
@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 64, "dim": 64, "size": 128, "groups": 8},  # half of Nemotron-H's heads
        {"heads": 24, "dim": 64, "size": 256, "groups": 1, "gate": True},  # Falcon-H1's
        {"heads": 8, "dim": 70, "size": 64, "weights": torch.float32},
        {"heads": 4, "dim": 10, "size": 16, "bias": False, "skip": False},
        {"heads": 4, "dim": 10, "size": 24},  # no kernel is for it
    ],
    ids=["Nemotron-H", "Falcon-H1", "float32 weights", "small", "plain torch"],
)
def test_recurrences_err_no_more_than_torch_and_graphs_hold_them(
    sizes: dict[str, Any], dtype: torch.dtype, generator: torch.Generator
) -> None:
    ours, torchs = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(DRAWS):
        given: list[Any] = mamba2_arguments(generator, dtype, device=GPU, **sizes)
        exact, by_torch = mamba2_oracle(given), mamba2_by_torch(given)
        ours += run_and_replay(ops.mamba2_step, given, 8).errors(exact, given[-1])
        torchs += by_torch.errors(exact, given[-1])
    assert (ours <= 1.5 * torchs).all(), (ours, torchs)


@DTYPES
@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 32, "key_heads": 16, "size": 128, "dim": 128, "tokens": 1},  # Qwen3-Next's
        {"heads": 6, "key_heads": 6, "size": 96, "dim": 192, "tokens": 16},  # Olmo hybrid's
        {"heads": 4, "key_heads": 2, "size": 128, "dim": 128, "tokens": 70},
        {"tokens": 5, "size": 256, "dim": 34},
        {"tokens": 3, "dim": 5},  # no kernel is for it
    ],
    ids=["Qwen3-Next", "Olmo hybrid", "long", "wide", "plain torch"],
)
def test_delta_rules_err_no_more_than_torch_and_graphs_hold_them(
    sizes: dict[str, Any], dtype: torch.dtype, generator: torch.Generator
) -> None:
    ours, torchs = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(2):
        given: list[Any] = delta_arguments(generator, dtype, device=GPU, **sizes)
        exact, by_torch = delta_oracle(given), delta_by_torch(given)
        ours += run_and_replay(ops.delta_rule, given, 6).errors(exact, given[-1])
        torchs += by_torch.errors(exact, given[-1])
    assert (ours <= 1.5 * torchs).all(), (ours, torchs)


@DTYPES
@pytest.mark.parametrize(("rows", "dim", "gated"), [(3, 4096, False), (1000, 128, True), (2, 515, True)])
def test_norms_have_the_numbers_of_the_oracle(
    rows: int, dim: int, gated: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, gate = (torch.randn(rows, 2, dim, generator=generator).to(GPU, dtype)[:, 1] for _ in range(2))
    weight, given = torch.randn(dim, generator=generator).to(GPU, dtype), gate if gated else None
    exact = norm_oracle(x, weight, given, 1e-6, float(gated))
    error = (ops.rms_norm(x, weight, given, 1e-6, float(gated)).double() - exact).abs()
    assert (error <= max(1e-5, torch.finfo(dtype).eps / 1.9) * exact.abs() + 1e-6).all()


def test_digests_change_with_any_word() -> None:
    words, sums = torch.arange(1 << 20, device=GPU), torch.zeros(1, dtype=torch.int64, device=GPU)
    for _ in range(2):
        ops.digest(words, 0, sums)
    once, twice = torch.zeros_like(sums), int(sums)
    ops.digest(words, 0, once)
    assert 2 * int(once) % 2**64 == twice % 2**64
    words[77] ^= 1 << 40
    ops.digest(words, 0, once)
    assert int(once) != twice


def test_checked_mode_refuses_slots_that_meet(checked: None, generator: torch.Generator) -> None:
    given = mamba2_arguments(generator, torch.bfloat16, 2, device=GPU)
    given[-2:] = torch.tensor([1, 2], device=GPU), torch.tensor([2, 1], device=GPU)
    with pytest.raises(ValueError, match="a row writes a slot that another one reads"):
        ops.mamba2_step(*given)


def test_steps_of_mamba_2_in_graphs_run_by_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    """With sizes that the kernels are for, several groups, and a batch that a bucket pads."""
    caplog.set_level(logging.INFO, "prefixkit")
    changes = {"ssm_state_size": 128, "n_groups": 2, "mamba_head_dim": 64}
    exact = make_hybrid("nemotron_h", head_dim=64, **changes).to("cuda", torch.bfloat16).float()
    model = prefixkit.patch(copy.deepcopy(exact).to(torch.bfloat16))
    prompts = [np.random.default_rng(number).integers(3, VOCAB, 30).tolist() for number in range(2)]
    with Session(model) as session:
        found = session.generate(prompts, SamplingParams(n=7, max_new_tokens=24, stop_token_ids=()))
        assert_logprobs(model, prompts, [*found][::3], exact)
        assert session.report.graph_steps > 0
    said = [record.message for record in caplog.records]
    assert any("stay in their pool on cuda" in line for line in said) and not any("_step on" in line for line in said)


# Of each kind of state one model, and Mamba 2 without attention.
@pytest.fixture(params=[*HYBRIDS, "mamba2"])
def exact(request: pytest.FixtureRequest) -> Any:
    """A float32 model, whose weights are numbers of bfloat16."""
    return make_hybrid(request.param, head_dim=64).to("cuda", torch.bfloat16).float()


@pytest.fixture
def model(exact: Any) -> Iterator[Any]:
    model = prefixkit.patch(copy.deepcopy(exact).to(torch.bfloat16))
    yield model
    prefixkit.unpatch(model)


@pytest.mark.parametrize("seed", [None, 614688463])
def test_samples_in_graphs_have_the_probabilities_of_one_forward_pass(exact: Any, model: Any, seed: int | None) -> None:
    """Requests refill, rows end at different steps, and later calls go on from samples of earlier ones.

    With the given seed a row of lfm2 fills its last page just before its batch is compacted (one H200).
    """
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    print("seed", seed)
    rng = np.random.default_rng(seed)
    head = rng.integers(3, VOCAB, 60).tolist()
    prompts = [head[: rng.integers(1, 60)] + rng.integers(3, VOCAB, rng.integers(1, 30)).tolist() for _ in range(6)]
    with Session(model, most_running=16) as session:
        for turn in range(2):
            found = session.generate(prompts, SamplingParams(n=4, max_new_tokens=16, seed=turn, stop_token_ids=(5, 9)))
            # All samples: with these weights some errors are a hundred times others, and few tokens say little.
            assert_logprobs(model, prompts, found, exact)
            assert session.report.graph_steps > 0
            prompts = [prompts[one.prompt_index] + list(one.tokens) for one in found][::6]
            prompts = [one[: 2 * len(one) // 3] if i % 2 else one for i, one in enumerate(prompts)]


@pytest.mark.parametrize("own", [9, 70])
def test_prompts_of_one_length_run_by_graphs_without_padding(exact: Any, model: Any, own: int) -> None:
    """Padding would enter states; prompts of more than 64 tokens store another state on their way."""
    print("seed", own)
    rng = np.random.default_rng(own)
    head = rng.integers(3, VOCAB, 120).tolist()
    first = rng.permutation(np.arange(3, VOCAB)).tolist()  # so that no text shares more than the head with another
    with Session(model) as session:
        session.generate([head], max_new_tokens=1)
        for turn in range(4 * USES):  # a pool that grows takes graphs with it
            prompts = [[*head, first[turn], *rng.integers(3, VOCAB, own - 1).tolist()]]
            found = session.generate(prompts, n=2, max_new_tokens=6, seed=turn, stop_token_ids=())
            if found.report.graph_steps == 1 + 5:  # the step over the prompt, and later ones
                assert_logprobs(model, prompts, found, exact)
                break
        else:
            pytest.fail("no graph has run the step over the prompt")


def test_beams_in_graphs_have_the_probabilities_of_one_forward_pass(exact: Any, model: Any) -> None:
    prompts = [np.random.default_rng(number).integers(3, VOCAB, 20).tolist() for number in range(2)]
    found = prefixkit.beam_search(model, None, prompts, num_beams=3, max_new_tokens=8)
    assert_logprobs(model, prompts, found, exact)
