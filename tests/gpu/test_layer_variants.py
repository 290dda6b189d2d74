"""Users' variants in models on a GPU: samples in graphs err no more than the same model in one whole pass."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit.attention.variants import Variant, alibi, compose, sliding_window, soft_cap
from tests.gpu.test_model import model_of, prompts
from tests.models.variant_oracle import whole_pass

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40, "stop_token_ids": ()}


def documents() -> Variant:
    number = torch.arange(2048, device="cuda") // 300

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (number[q_idx] == number[kv_idx]) & (kv_idx <= q_idx)

    return prefixkit.variant(mask_mod=mask_mod, name="documents")


def biased(bias: Tensor) -> Variant:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, (q_idx - kv_idx).clamp(0, 63)]

    return prefixkit.variant(score_mod, name="bias by distance")


def prefix_lm() -> Variant:
    return prefixkit.variant(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < 512), name="prefix-LM")


VARIANTS: dict[str, Callable[[], Any]] = {
    "ALiBi and cap": lambda: compose(alibi([2.0**-n for n in range(1, 9)]), soft_cap(4.0)),
    "window": lambda: sliding_window(200),
    "documents": documents,
    "by layer": lambda: {0: sliding_window(64), 2: soft_cap(2.0)},
    "prefix-LM": prefix_lm,
}


def errors(model: Any, variant: Any, samples: Any) -> tuple[float, float]:
    """Of samples' log-probabilities, against float64, and of one whole pass in the model's dtype."""
    exact, ours, stock = copy.deepcopy(model).double(), list[Tensor](), list[Tensor]()
    for sample in samples:
        prompt = prompts(21)[sample.prompt_index]
        text, ids = [*prompt, *sample.tokens], torch.tensor(sample.tokens, device=model.device)[:, None]
        truth, rounded = (
            whole_pass(each, text, variant, len(prompt)).log_softmax(-1)[len(prompt) - 1 : -1].gather(1, ids)[:, 0]
            for each in (exact, model)
        )
        ours.append(torch.tensor(sample.logprobs, device=model.device).double() - truth)
        stock.append(rounded.double() - truth)
    return float(torch.cat(ours).norm()), float(torch.cat(stock).norm())


@pytest.mark.parametrize("name", VARIANTS)
def test_log_probabilities_err_no_more_than_those_of_a_whole_pass(name: str) -> None:
    model, variant = model_of(128, torch.bfloat16), VARIANTS[name]()
    patched = prefixkit.patch(copy.deepcopy(model), variant=variant)
    samples = prefixkit.generate(patched, None, prompts(21), **GREEDY)
    ours, stock = errors(model, variant, samples)
    assert ours <= 1.5 * stock, (ours, stock)


def test_a_captured_tensor_that_changes_in_place_changes_what_a_session_samples() -> None:
    torch.manual_seed(4)
    model, bias = model_of(128, torch.bfloat16), torch.randn(8, 64, device="cuda")
    variant = biased(bias)
    with prefixkit.Session(prefixkit.patch(copy.deepcopy(model), variant=variant)) as session:
        for _ in range(3):
            result = session.generate(prompts(21), **GREEDY)
            ours, stock = errors(model, variant, result)
            assert ours <= 1.5 * stock, (ours, stock)
            bias.neg_()


def launches(work: Callable[[], Any]) -> Counter[str]:
    """How often each of our kernels is launched."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    names = ("classify_blocks", "tree_attention")
    return Counter(name for event in profile.events() for name in names if name in event.name)


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_share_one_classification_of_blocks_in_each_step_of_a_graph(compiled: bool) -> None:
    """Documents are in a captured tensor, so that ranges of positions do not say what is hidden."""
    model, variant = model_of(128, torch.bfloat16), documents()
    patched = prefixkit.patch(copy.deepcopy(model), variant=variant)
    layers = len(patched.model.layers)
    with prefixkit.Session(patched, compiled=compiled) as session:
        session.generate(prompts(21), **GREEDY)  # compiles and captures
        samples = list[Any]()
        count = launches(lambda: samples.extend(session.generate(prompts(21), **GREEDY)))
        assert count["classify_blocks"] >= GREEDY["max_new_tokens"] - 1
        assert count["tree_attention"] == layers * count["classify_blocks"]
        ours, stock = errors(model, variant, samples)
        assert ours <= 1.5 * stock, (ours, stock)


def test_decode_steps_classify_no_blocks_under_a_window() -> None:
    patched = prefixkit.patch(model_of(128, torch.bfloat16), variant=sliding_window(200))
    with prefixkit.Session(patched) as session:
        session.generate(prompts(21), **GREEDY)
        count = launches(lambda: session.generate(prompts(22), **GREEDY))
    assert count["classify_blocks"] < GREEDY["max_new_tokens"] / 4 < count["tree_attention"]
