"""Models with another head than a language model's give the values of their own forward, and do not sample."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForTokenClassification,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

import prefixkit
from prefixkit import Session
from prefixkit.testing.tiny import ByteTokenizer, tiny_llama

CLASSES = [LlamaForTokenClassification, LlamaForSequenceClassification, BloomForTokenClassification]


def classifier(cls: Any) -> Any:
    """A patched classifier of three labels with random weights."""
    bloom = BloomConfig(vocab_size=260, hidden_size=64, n_layer=2, n_head=4)
    config = bloom if cls is BloomForTokenClassification else copy.deepcopy(tiny_llama().config)
    config.num_labels = 3
    torch.manual_seed(1)
    return prefixkit.patch(cls(config).eval())


@pytest.fixture(scope="module")
def reward() -> Any:
    return classifier(LlamaForTokenClassification)


@pytest.fixture
def texts() -> list[list[int]]:
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    shared = rng.integers(5, 250, 20).tolist()
    return [[*shared, *rng.integers(5, 250, count).tolist()] for count in (3, 9)]


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """What the model's own forward gives, in float64: a row for each token, or one for the text."""
    with torch.no_grad():
        made = prefixkit.unpatch(copy.deepcopy(model)).double()(torch.tensor([tokens])).logits
    return made[0] if made.ndim == 3 else made


@pytest.mark.parametrize("cls", CLASSES)
def test_values_of_its_head_are_its_own_logits(cls: Any, texts: list[list[int]]) -> None:
    model = classifier(cls)
    head = model.classifier if cls is BloomForTokenClassification else model.score
    with Session(model, kv_budget="1MiB") as session:
        for at in ("last",) if cls is LlamaForSequenceClassification else ("last", "all"):
            for found, tokens in zip(session.values(texts, head, at=at), texts, strict=True):
                torch.testing.assert_close(found.double(), logits(model, tokens)[-len(found) :], rtol=1e-4, atol=1e-4)
        assert session.report.prompts == len(texts)


def test_texts_longer_than_a_prefill_chunk_give_values_after_their_ends(reward: Any, texts: list[list[int]]) -> None:
    with Session(reward, kv_budget="1MiB", prefill_chunk=4) as session:  # most steps have no token that is asked for
        for found, tokens in zip(session.values(texts, reward.score), texts, strict=True):
            torch.testing.assert_close(found[0].double(), logits(reward, tokens)[-1], rtol=1e-4, atol=1e-4)


def test_a_bare_decoder_gives_values_too(texts: list[list[int]]) -> None:
    model = prefixkit.patch(tiny_llama().model)
    with Session(model, kv_budget="1MiB") as session, torch.no_grad():
        want = tiny_llama().double().model(torch.tensor([texts[0]])).last_hidden_state[0]
        found = session.values(texts[0], lambda hidden: hidden, at="all")
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


REFUSED: dict[str, Callable[[Session, Path], Any]] = {
    "generate": lambda session, _: session.generate([[5, 6]]),
    "beam_search": lambda session, _: session.beam_search([[5, 6]], num_beams=2),
    "stream": lambda session, _: session.stream([[5, 6]]),
    "step": lambda session, _: session.step(session.prompt([5, 6])),
    "score": lambda session, _: session.score([5, 6], [[7]]),
    "pin": lambda session, _: session.pin([5, 6]),
    "save": lambda session, folder: session.save(folder / "prefixes.safetensors", [5, 6]),
    "prefixkit.generate": lambda session, _: prefixkit.generate(session.model, None, [[5, 6]]),
    "prefixkit.score": lambda session, _: prefixkit.score(session.model, None, [5, 6], [[7]]),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_needs_a_language_model_head_is_refused_before_anything_runs(
    reward: Any, call: Callable[[Session, Path], Any], tmp_path: Path
) -> None:
    with Session(reward, ByteTokenizer(), kv_budget="1MiB") as session:
        with pytest.raises(TypeError, match=r"LlamaForTokenClassification has no language-model head.*session.values"):
            call(session, tmp_path)
        assert not list(tmp_path.iterdir())
        assert session.store is not None and not session.store.tree.num_cached
        assert session.values([5, 6], reward.score).shape == (1, 3)
