"""Modules whose states several tokens continue, against one whole forward of transformers' own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from prefixkit.models.states.scan_bodies import states_body

pytestmark = pytest.mark.skipif(not Path("scripts/tiny_models.py").exists(), reason="needs the repository's scripts")
MAMBA = {
    "mamba": "MambaMixer",
    "falcon_mamba": "FalconMambaMixer",
    "jamba": "JambaMambaMixer",
    "zamba": "ZambaMambaMixer",
}
CLASSES = MAMBA | {"minimax": "MiniMaxLightningAttention", "recurrent_gemma": "RecurrentGemmaRecurrentBlock"}
FAMILIES = pytest.mark.parametrize("family", CLASSES)
TOKENS = 30
BLOCK = 8  # of MiniMax's attention: texts are longer


def mixer_of(family: str) -> nn.Module:
    from scripts.tiny_models import tiny_config, tiny_model

    torch.manual_seed(0)
    model = tiny_model(tiny_config(family, **({"block_size": BLOCK} if family == "minimax" else {})), "")
    return [module for module in model.modules() if type(module).__name__ == CLASSES[family]][-1]


def given(family: str, positions: range, cache: Cache | None) -> dict[str, Any]:
    """What else a module takes for tokens at some positions."""
    if family in MAMBA:
        return {"cache_params": cache}
    found = {"past_key_values": cache, "attention_mask": None}
    if family == "minimax":
        return found | {"position_embeddings": None}
    return found | {"position_ids": torch.tensor([list(positions)]), "use_cache": cache is not None}


def run(family: str, mixer: nn.Module, texts: Tensor, cache: Cache | None = None, first: int = 0) -> Tensor:
    """Outputs of our body where there is a cache, else of transformers' own code."""
    forward: Callable[..., Any] | None = states_body(type(mixer)) if cache else type(mixer).forward
    assert forward is not None
    with torch.no_grad():
        made = forward(mixer, texts, **given(family, range(first, first + texts.shape[1]), cache))
    return made[0] if isinstance(made, tuple) else made


def empty() -> Cache:
    return Cache(layers=[LinearAttentionLayer()] * 4)


def in_pieces(family: str, mixer: nn.Module, texts: Tensor, cuts: list[int]) -> Tensor:
    cache, outputs, first = empty(), [], 0
    for cut in cuts:
        outputs.append(run(family, mixer, texts[:, first : first + cut], cache, first))
        first += cut
    return torch.cat(outputs, 1)


def joined(caches: list[Cache]) -> Cache:
    """A cache of the states of others, as a batch."""
    layer, layers = LinearAttentionLayer(), [cache.layers[0] for cache in caches]
    for states, known in (("conv_states", "is_conv_states_initialized"), ("recurrent_states",) * 2):
        held = [getattr(each, states)[0] for each in layers]
        if held[0] is not None:
            getattr(layer, states)[0] = torch.cat(held)
            getattr(layer, "is_recurrent_states_initialized" if known == states else known)[0] = True
    layer.conv_kernel_size, layer.has_previous_state = layers[0].conv_kernel_size, {0: True}
    return Cache(layers=[layer] * 4)


def cuts_of(seed: int) -> list[int]:
    chooser, cuts = random.Random(seed), []
    while (left := TOKENS - sum(cuts)) > 0:
        cuts.append(min(left, chooser.choice([1, 2, 3, 5, 8, 13])))
    return cuts


def check(family: str, mixer: nn.Module, texts: Tensor, outputs: Tensor, rows: slice = slice(None)) -> None:
    """Outputs, of some rows of the texts, are as near to transformers' own float64 code as its own code is.

    The larger of its own errors counts: of a whole forward, or of one token after the other, in the dtype of the texts.
    """
    truth = run(family, copy.deepcopy(mixer).double(), texts.double())
    assert outputs.shape == truth[:, rows].shape and outputs.dtype == texts.dtype
    mine = (outputs - truth[:, rows]).abs()
    theirs = [(run(family, mixer, texts) - truth).abs()]
    if family in MAMBA:
        theirs.append((one_by_one(mixer, texts) - truth).abs())
    assert mine.max() <= 1.5 * max(each.max() for each in theirs)
    assert mine.square().mean().sqrt() <= 1.5 * max(each.square().mean().sqrt() for each in theirs)


def one_by_one(mixer: Any, texts: Tensor) -> Tensor:
    """What transformers' own code makes of one token after the other, which it does right."""
    cache = empty()
    with torch.no_grad():
        return torch.cat([type(mixer).forward(mixer, token, cache_params=cache) for token in texts.split(1, 1)], 1)


@pytest.mark.drawn(3)
@FAMILIES
@pytest.mark.parametrize("seed", range(3))
def test_pieces_equal_one_whole_forward(family: str, seed: int) -> None:
    mixer, texts = mixer_of(family), torch.randn(2, TOKENS, 64)
    check(family, mixer, texts, in_pieces(family, mixer, texts, cuts_of(seed)))


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pieces_in_other_dtypes(family: str, dtype: torch.dtype) -> None:
    mixer, texts = mixer_of(family).to(dtype), torch.randn(2, TOKENS, 64).to(dtype)
    outputs = in_pieces(family, mixer, texts, cuts_of(0))
    if dtype == torch.bfloat16:
        check(family, mixer, texts, outputs)
    else:  # transformers computes parts of each module in float32, in both
        torch.testing.assert_close(outputs, run(family, mixer, texts), rtol=1e-6, atol=1e-6)


@pytest.mark.drawn(6)
@FAMILIES
@pytest.mark.parametrize("start", [0, 1, 2, 9])
@pytest.mark.parametrize("tokens", [1, 3])
def test_pieces_shorter_than_the_convolution(family: str, start: int, tokens: int) -> None:
    """From no state, and from the state after as few tokens, and then the state goes on."""
    mixer, texts = mixer_of(family), torch.randn(3, TOKENS, 64)
    cuts = [cut for cut in (start, tokens, TOKENS - start - tokens) if cut]
    check(family, mixer, texts, in_pieces(family, mixer, texts, cuts))


@pytest.mark.drawn(3)
@FAMILIES
@pytest.mark.parametrize("tokens", [1, 3, 11])
def test_segments_of_several_texts_are_one_batch(family: str, tokens: int) -> None:
    """Segments of equal length from states after as many tokens, and the states after the batch go on, each alone."""
    mixer, texts = mixer_of(family), torch.randn(4, TOKENS, 64)
    before, caches = 7, [empty() for _ in texts]
    for text, cache in zip(texts, caches, strict=True):
        run(family, mixer, text[None, :before], cache)
    batch = joined(caches)
    middle = run(family, mixer, texts[:, before : before + tokens], batch, before)
    check(family, mixer, texts, middle, slice(before, before + tokens))
    layer = batch.layers[0]
    for name, states in (("conv_states", layer.conv_states), ("recurrent_states", layer.recurrent_states)):
        for at, cache in enumerate(caches):
            if states[0] is not None:
                getattr(cache.layers[0], name)[0] = states[0][at : at + 1].clone()
    first = before + tokens
    ends = [run(family, mixer, text[None, first:], cache, first) for text, cache in zip(texts, caches, strict=True)]
    check(family, mixer, texts, torch.cat(ends), slice(first, None))


@pytest.mark.parametrize("family", MAMBA)
def test_segments_from_states_after_texts_of_any_length_are_one_batch(family: str) -> None:
    """Where no layer takes positions, the lengths of the texts before do not matter."""
    mixer, texts = mixer_of(family), torch.randn(4, TOKENS, 64)
    starts, tokens, caches = [1, 2, 7, 19], 11, [empty() for _ in texts]
    for text, cache, start in zip(texts, caches, starts, strict=True):
        run(family, mixer, text[None, :start], cache)
    segments = torch.stack([text[start : start + tokens] for text, start in zip(texts, starts, strict=True)])
    outputs = run(family, mixer, segments, joined(caches))
    for text, start, out in zip(texts, starts, outputs, strict=True):
        check(family, mixer, text[None], out[None], slice(start, start + tokens))


def test_a_recurrent_block_stores_nothing_in_itself_and_begins_anew_at_position_0() -> None:
    mixer, texts = mixer_of("recurrent_gemma"), torch.randn(1, TOKENS, 64)
    stale = empty()
    run("recurrent_gemma", mixer, texts[:, :5], stale)
    stale.layers[0].conv_states[0].zero_()
    again = run("recurrent_gemma", mixer, texts, stale)  # from position 0 on
    assert mixer.conv1d_state is None and mixer.rg_lru.recurrent_states is None
    check("recurrent_gemma", mixer, texts, again)


@FAMILIES
def test_weights_that_accelerate_loads_for_each_call(family: str) -> None:
    mixer, texts = mixer_of(family), torch.randn(2, TOKENS, 64)
    wanted = in_pieces(family, mixer, texts, cuts_of(0))
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(mixer, execution_device=torch.device("cpu"))
    assert {weight.device.type for weight in mixer.parameters()} == {"meta"}
    mixer._hf_hook.pre_forward(mixer)  # as a call of the module does
    assert torch.equal(in_pieces(family, mixer, texts, cuts_of(0)), wanted)


def test_classes_that_transformers_continues_by_itself_need_no_body() -> None:
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    class MambaMixer(nn.Module):
        pass

    for cls in (Lfm2ShortConv, Mamba2Mixer, MambaMixer, nn.Linear):
        assert states_body(cls) is None
    for family in CLASSES:
        assert states_body(type(mixer_of(family))) is not None
