"""Prompts of few tokens by CUDA graphs: logits err no more than those of the unpatched model, whatever the tree."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit.engine.request import BeamParams, Request, Sample
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from prefixkit.testing.integrity import check_tree
from tests.gpu.test_layer_kinds import WINDOWS, model_of
from tests.gpu.test_model import model_of as llama_of
from tests.models.tiny_families import VOCAB

ROUNDS = 24
MODELS: dict[str, Any] = {
    "llama 64": lambda dtype: llama_of(64, dtype),
    "llama 128": lambda dtype: llama_of(128, dtype),
    "llama 256": lambda dtype: llama_of(256, dtype),
    **{name: lambda dtype, name=name: model_of(name, dtype, **WINDOWS[name]) for name in WINDOWS},
}


def rounds(seed: int, **params: Any) -> list[list[Request]]:
    """For each call one to four prompts: 300 tokens or more of an earlier one, and up to 30 of their own."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    head = rng.integers(3, VOCAB, 300)
    known, asked = [head], list[list[Request]]()
    for _ in range(ROUNDS):
        made = list[np.ndarray]()
        for _ in range(rng.integers(1, 5)):
            before = known[rng.integers(len(known))]
            cut = rng.integers(290, len(before) + 1)
            made.append(np.concatenate((before[:cut], rng.integers(3, VOCAB, rng.integers(1, 30)))))
        known += made
        asked.append([Request(index, tokens, SamplingParams(**params)) for index, tokens in enumerate(made)])
    return asked


Text = tuple[np.ndarray, np.ndarray, np.ndarray]  # a prompt, tokens after it, and their log-probabilities


def texts_of(asked: list[Request], found: list[Sample]) -> list[Text]:
    return [(asked[one.prompt_index].tokens, np.array(one.tokens), np.array(one.logprobs)) for one in found]


def assert_err_no_more(model: Any, texts: list[Text]) -> None:
    """By the root mean square over all log-probabilities, against the same weights in float64.

    In float32 with experts: torch's grouped products take no float64.
    """
    experts = any("experts" in name for name, _ in model.named_modules())
    exact = copy.deepcopy(model).to(torch.float32 if experts else torch.float64)
    ours, theirs = list[float](), list[float]()
    for prompt, tokens, logprobs in texts:
        ids = torch.tensor(np.concatenate((prompt, tokens))[None], device="cuda")
        with torch.no_grad():
            all_of = [of(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1) for of in (exact, model)]
        true, stock = (of.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy() for of in all_of)
        ours += (logprobs - true).tolist()
        theirs += (stock - true).tolist()
    of_ours, of_theirs = (float(np.sqrt(np.mean(np.square(errors)))) for errors in (ours, theirs))
    assert of_ours <= 1.5 * of_theirs, (of_ours, of_theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_few_tokens_err_no_more_than_unpatched(name: str, dtype: torch.dtype) -> None:
    """A prompt that is known but for some tokens is a short step; after some of them a graph runs it."""
    model = MODELS[name](dtype)
    asked = rounds(1, n=2, temperature=1.0, max_new_tokens=2)
    with prefixkit.patched(model):
        engine = make_engine(model, [one for requests in asked for one in requests])
        found = [text for one in asked for text in texts_of(one, engine.run(one))]
        assert engine.runner.graphs.replays >= 8, "some of 24 calls and their second steps"
    check_tree(engine.store.tree)
    assert_err_no_more(model, found)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("compiled", [False, True])
def test_prompts_in_chunks_run_beside_samples(page_size: int, compiled: bool) -> None:
    """Chunks of 40 tokens of one prompt, and the tokens of samples of the prompts before it, are one step."""
    model = llama_of(128, torch.bfloat16)
    asked = rounds(2, n=3, temperature=1.0, max_new_tokens=24)[:8]
    together = [
        Request(index, one.tokens, one.params)
        for index, one in enumerate(one for requests in asked for one in requests)
    ]
    with prefixkit.patched(model):
        engine = make_engine(model, together, page_size=page_size, compiled=compiled, prefill_chunk=40)
        found = texts_of(together, engine.run(together))
        assert engine.report.captures > 1
        check_tree(engine.store.tree)
        engine.store.cache.clear()
        assert engine.store.tree.allocator.free == engine.store.tree.allocator.num_pages
    assert_err_no_more(model, found)


def test_scores_of_short_texts() -> None:
    model, rng, found = llama_of(64, torch.bfloat16), np.random.default_rng(4), list[Text]()
    with prefixkit.patched(model):
        engine = make_engine(model, rounds(3, n=1)[0])
        for _ in range(10):
            texts = [rng.integers(3, VOCAB, 20).astype(np.int32) for _ in range(3)]
            scores = engine.score([text[:12] for text in texts], [[text[12:]] for text in texts], VOCAB)
            found += [(text[:12], text[12:], one.logprobs) for text, (one,) in zip(texts, scores, strict=True)]
        assert engine.runner.graphs.replays == 6, "10, without the first four"
    assert_err_no_more(model, found)


def test_beams_of_short_prompts() -> None:
    """Scores of both ways are equal but for rounding, which decides some near-ties."""
    model = prefixkit.patch(llama_of(64, torch.bfloat16))
    beams = BeamParams(4, 4, max_new_tokens=6, stop_token_ids=())
    asked = [[Request(one.prompt_index, one.tokens, beams) for one in requests] for requests in rounds(3, n=1)]
    all_asked = [one for requests in asked for one in requests]
    engine, plain = make_engine(model, all_asked), make_engine(model, all_asked, graphs=False)
    close = list[bool]()
    for requests in asked:
        found, expected = engine.run(requests), plain.run(requests)
        close += [a.score == pytest.approx(b.score, rel=1e-2) for a, b in zip(found, expected, strict=True)]
        check_tree(engine.store.tree)
    assert np.mean(close) > 0.9
    assert engine.runner.graphs.replays > ROUNDS * 5, "more than the steps after the first"


def test_graphs_of_moved_weights_are_not_replayed() -> None:
    model = llama_of(64, torch.bfloat16)
    with prefixkit.patched(model):
        asked = rounds(5, n=1, temperature=0.0, max_new_tokens=1)
        engine = make_engine(model, [one for requests in asked for one in requests])
        for one in asked[:12]:
            engine.run(one)
        captures = engine.runner.graphs.captures
        assert captures > 0
        engine.store.cache.clear()
        for parameter in model.parameters():
            old, parameter.data = parameter.data, parameter.data.clone()
            old.fill_(torch.nan)
        found = [text for one in asked for text in texts_of(one, engine.run(one))]
        assert engine.runner.graphs.captures > captures
    assert_err_no_more(model, found)
