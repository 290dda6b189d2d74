"""Layers that keep a state on a GPU: decode steps in graphs, forks, calls that go on from calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import prefixkit
from prefixkit import SamplingParams, Session
from tests.models.states.hybrids import HYBRIDS, VOCAB, assert_logprobs, make_hybrid


@pytest.fixture(params=HYBRIDS)
def model(request: pytest.FixtureRequest) -> Any:
    model = prefixkit.patch(make_hybrid(request.param, head_dim=64).to("cuda"))
    yield model
    prefixkit.unpatch(model)


def test_samples_in_graphs_have_the_probabilities_of_one_forward_pass(model: Any) -> None:
    """Requests refill, rows end at different steps, and a second call goes on from samples of the first."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    rng = np.random.default_rng(seed)
    head = rng.integers(3, VOCAB, 60).tolist()
    prompts = [head[: rng.integers(1, 60)] + rng.integers(3, VOCAB, rng.integers(1, 30)).tolist() for _ in range(9)]
    with Session(model, most_running=16) as session:
        for turn in range(3):
            found = session.generate(prompts, SamplingParams(n=4, max_new_tokens=40, seed=turn, stop_token_ids=(5, 9)))
            assert_logprobs(model, prompts, found, 2e-3)
            prompts = [prompts[one.prompt_index] + list(one.tokens) for one in found][::5]
            prompts = [one[: 2 * len(one) // 3] if i % 2 else one for i, one in enumerate(prompts)]
        assert session.report.graph_steps > 0


def test_beams_and_graphs_give_what_beams_without_graphs_do(model: Any) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB, 20).tolist() for _ in range(2)]
    fast = prefixkit.beam_search(model, None, prompts, num_beams=3, max_new_tokens=12)
    slow = prefixkit.beam_search(model.to("cpu"), None, prompts, num_beams=3, max_new_tokens=12)
    assert [one.tokens for one in fast] == [one.tokens for one in slow]
