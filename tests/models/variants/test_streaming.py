"""A patched model at positions in the cache computes what a cache does whose keys are rotated anew at every token."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit import UnsupportedVariant, patch, variants
from prefixkit.attention.variants import compose
from prefixkit.models import facts_of
from tests.models.variants.rotating_cache import token_by_token
from tests.models.variants.test_layer_variants import LATENT


def rotary(base: float, dims: int, interleaved: bool = False) -> Any:
    """Rotary embedding as the paper has it, in float64."""
    return of_frequencies(base ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims), dims, interleaved)


def of_frequencies(frequencies: Tensor, dims: int, interleaved: bool) -> Any:
    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None] * frequencies.to(x.device)
        # In 16 bits as transformers' models do it.
        dtype = torch.float64 if x.dtype in (torch.float32, torch.float64) else x.dtype
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        turning, still = x[..., :dims].to(dtype), x[..., dims:]
        first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
        pair = first * cos - second * sin, second * cos + first * sin
        made = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat((made.to(x.dtype), still), -1)

    return rotate


FAMILIES = {
    "llama": ({}, rotary(10000.0, 24)),
    "cohere": ({}, rotary(500000.0, 16, interleaved=True)),
    "gpt_neox": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        rotary(500.0, 8),
    ),
    "qwen3": ({"use_sliding_window": False, "layer_types": ["full_attention"] * 2}, rotary(10000.0, 24)),
}


def logits_on_tree(drive: Any, model: Any, texts: list[list[int]], variant: Any, budget: int = 7) -> list[Tensor]:
    run = drive(model, variant=variant)
    for text in texts:
        run.tree.insert(text)
    run.run(budget=budget)
    return [run.logits_of(text) for text in texts]


def measured(model: Any) -> Any:
    """What was measured of a patched model's rotation, as the paper rotates."""
    (rotation,) = {kind.rotation for kind in facts_of(model).layers}
    frequencies = torch.tensor(rotation.frequencies, dtype=torch.float64)
    return of_frequencies(frequencies, 2 * len(frequencies), rotation.interleaved)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "family", ["gemma2", "gpt_oss", "glm", "ernie4_5", "stablelm", "nemotron", "phi", "olmo3", "granite"]
)
def test_families_with_caps_sinks_partial_and_scaled_rotation(family: str, tiny, drive, rng) -> None:
    """Their own windows hold as much as the cache."""
    model, text = tiny(family), rng.integers(3, 128, 24).tolist()
    run = drive(model, variant=variants.streaming_llm(2, 4))
    run.tree.insert(text)
    run.run(budget=7)
    want = token_by_token(model, text, 2, 4, measured(run.model))
    assert torch.allclose(run.logits_of(text), want, atol=1e-4)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("sinks", "window"), [(4, 8), (1, 1), (2, 15)])
def test_logits_are_those_of_a_cache_that_is_rotated_anew(
    family: str, sinks: int, window: int, tiny, drive, rng
) -> None:
    """Texts share prefixes longer than a window."""
    options, rotate = FAMILIES[family]
    model = tiny(family, **options)
    head = rng.integers(3, 128, 25).tolist()
    texts = [[*head, *rng.integers(3, 128, n).tolist()] for n in (3, 14)] + [[5, 6, 7]]
    found = logits_on_tree(drive, model, texts, variants.streaming_llm(sinks, window))
    for text, logits in zip(texts, found, strict=True):
        want = token_by_token(model, text, sinks, window, rotate)
        assert torch.allclose(logits, want, atol=1e-4), (logits - want).abs().max()


def test_a_user_s_bias_by_distance_is_that_in_the_cache(tiny, drive, rng) -> None:
    model, slopes = tiny("llama"), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    text = rng.integers(3, 128, 40).tolist()
    (found,) = logits_on_tree(drive, model, [text], compose(variants.streaming_llm(3, 9), variants.alibi(slopes)))
    want = token_by_token(model, text, 3, 9, FAMILIES["llama"][1], slopes)
    assert torch.allclose(found, want, atol=1e-4)


def test_some_layers_alone(tiny, drive, rng) -> None:
    model, text = tiny("llama"), rng.integers(3, 128, 40).tolist()
    (found,) = logits_on_tree(drive, model, [text], {1: variants.streaming_llm(3, 9)})
    want = token_by_token(model, text, 3, 9, FAMILIES["llama"][1], layers=[1])
    assert torch.allclose(found, want, atol=1e-4)
    assert facts_of(patch(model, variant={1: variants.streaming_llm(3, 9)})).held is None, "the other layer sees all"


def test_what_is_measured_is_the_rotation_of_each_layer(tiny) -> None:
    model = patch(tiny("gpt_neox", **FAMILIES["gpt_neox"][0]), variant=variants.streaming_llm(2, 6))
    for kind in facts_of(model).layers:
        assert kind.rotation is not None and not kind.rotation.interleaved
        assert kind.rotation.frequencies == pytest.approx([500.0 ** -(i / 4) for i in range(4)], rel=1e-6)
    assert all(
        kind.rotation.interleaved
        for kind in facts_of(patch(tiny("cohere"), variant=variants.streaming_llm(2, 6))).layers
    )


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt2", {}, "attention layer 0 of GPT2LMHeadModel: its queries do not turn with their position"),
        ("deepseek_v2", LATENT, "keys as they cache them"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "keys as they cache them"),
        ("gemma2", {}, r"the layer sees less by itself \(window \d+\) than 40 tokens, sinks and window"),
    ],
)
def test_models_that_cannot_are_refused_by_name(family: str, options: Any, message: str, tiny) -> None:
    model = tiny(family, **options)
    with pytest.raises(UnsupportedVariant, match=message):
        patch(model, variant=variants.streaming_llm(4, 36))
    assert not prefixkit.models.is_patched(model)


def test_a_window_of_the_layers_own_that_holds_the_cache_hides_nothing(tiny, drive, rng) -> None:
    """Mistral's, say: positions in the cache never reach it."""
    model = tiny("mistral", sliding_window=12)
    text = rng.integers(3, 128, 40).tolist()
    (found,) = logits_on_tree(drive, model, [text], variants.streaming_llm(3, 9))
    want = token_by_token(model, text, 3, 9, FAMILIES["llama"][1])
    assert torch.allclose(found, want, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_it_errs_as_much_as_rotating_anew_does(dtype: torch.dtype, tiny, drive, rng) -> None:
    exact = tiny("llama")
    text, run = rng.integers(3, 128, 60).tolist(), partial(token_by_token, sinks=4, window=12)
    rotate, narrow = FAMILIES["llama"][1], tiny("llama").to(dtype)
    exact.load_state_dict(narrow.state_dict())
    want, theirs = run(exact, text, rotate=rotate), run(narrow, text, rotate=rotate)
    (ours,) = logits_on_tree(drive, narrow, [text], variants.streaming_llm(4, 12))
    assert (ours.double() - want.double()).norm() <= 1.5 * (theirs.double() - want.double()).norm()
