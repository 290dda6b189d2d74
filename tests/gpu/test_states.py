"""Layers that keep a state on a GPU: decode steps in graphs, forks, calls that go on from calls."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import SamplingParams, Session
from tests.models.states.hybrids import HYBRIDS, VOCAB, assert_logprobs, make_hybrid


@pytest.fixture(params=HYBRIDS)
def exact(request: pytest.FixtureRequest) -> Any:
    """A float32 model, whose weights are numbers of bfloat16."""
    return make_hybrid(request.param, head_dim=64).to("cuda", torch.bfloat16).float()


@pytest.fixture
def model(exact: Any) -> Iterator[Any]:
    model = prefixkit.patch(copy.deepcopy(exact).to(torch.bfloat16))
    yield model
    prefixkit.unpatch(model)


def test_samples_in_graphs_have_the_probabilities_of_one_forward_pass(exact: Any, model: Any) -> None:
    """Requests refill, rows end at different steps, and later calls go on from samples of earlier ones."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    rng = np.random.default_rng(seed)
    head = rng.integers(3, VOCAB, 60).tolist()
    prompts = [head[: rng.integers(1, 60)] + rng.integers(3, VOCAB, rng.integers(1, 30)).tolist() for _ in range(6)]
    with Session(model, most_running=16) as session:
        for turn in range(2):
            found = session.generate(prompts, SamplingParams(n=4, max_new_tokens=16, seed=turn, stop_token_ids=(5, 9)))
            assert_logprobs(model, prompts, [*found][::5], exact)
            assert session.report.graph_steps > 0
            prompts = [prompts[one.prompt_index] + list(one.tokens) for one in found][::6]
            prompts = [one[: 2 * len(one) // 3] if i % 2 else one for i, one in enumerate(prompts)]


def test_beams_in_graphs_have_the_probabilities_of_one_forward_pass(exact: Any, model: Any) -> None:
    prompts = [np.random.default_rng(number).integers(3, VOCAB, 20).tolist() for number in range(2)]
    found = prefixkit.beam_search(model, None, prompts, num_beams=3, max_new_tokens=8)
    assert_logprobs(model, prompts, found, exact)
