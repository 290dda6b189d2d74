"""Scores by a model whose layers keep states: slots for them hold those from which later tokens go on."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from tests.models.states.hybrids import VOCAB, make_hybrid


@pytest.fixture(scope="module")
def model() -> Any:
    return prefixkit.patch(make_hybrid("qwen3_next"))


@pytest.fixture
def rng() -> random.Random:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return random.Random(seed)


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def total(model: Any, prompt: list[int], option: list[int]) -> float:
    """The log-probability of one option by one forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + option]), use_cache=False).logits
    after = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float(after.gather(1, torch.tensor(option)[:, None]).sum())


def test_a_long_text_leaves_slots_for_the_fork_at_its_end(model: Any, rng: random.Random) -> None:
    """It passes more checkpoints in one step than there are slots."""
    prompt, options = text(rng, 900), [text(rng, 3), text(rng, 4)]
    whole = prefixkit.score(model, None, prompt, options, prefill_chunk=4096)
    assert [score.total for score in whole] == pytest.approx([total(model, prompt, one) for one in options], abs=1e-3)
    assert prefixkit.score(model, None, prompt, options[:1])[0].total == pytest.approx(whole[0].total, abs=1e-3)


@pytest.mark.parametrize("chunk", [None, 5])
def test_texts_that_part_anywhere_have_slots_for_every_fork(chunk: int | None, model: Any, rng: random.Random) -> None:
    base, prompts = text(rng, 30), list[list[int]]()
    for _ in range(5):
        prompts.append(base[: rng.randint(1, 30)] + text(rng, rng.randint(1, 9)))
        base = rng.choice([base, prompts[-1]])
    stem = text(rng, 4)
    options = [stem + text(rng, 2), stem + text(rng, 1), text(rng, 3)]
    found = prefixkit.score(model, None, prompts, options, prefill_chunk=chunk)
    for prompt, scores in zip(prompts, found, strict=True):
        assert [score.total for score in scores] == pytest.approx(
            [total(model, prompt, one) for one in options], abs=1e-3
        )


def test_a_text_that_passes_more_forks_than_there_are_slots_runs_once_more(model: Any, rng: random.Random) -> None:
    tokens = text(rng, 40)
    with prefixkit.Session(model, kv_budget="300KiB", page_size=1) as session:
        for length in range(1, 40):
            session.values([*tokens[:length], (tokens[length] + 1) % VOCAB], model.lm_head)
        assert session.store is not None and session.store.tree.states is not None
        assert session.store.tree.num_cached > 2 * session.store.tree.states.count, "there is a fork after each token"
        found = session.values(tokens, model.lm_head, at="all")
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
