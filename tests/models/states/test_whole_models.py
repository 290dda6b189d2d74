"""Tiny models that run texts in pieces once their modules with states run our bodies."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from prefixkit.models.attention_class import layer_number
from prefixkit.models.families import attention_layers
from prefixkit.models.states.scan_bodies import states_body

pytestmark = pytest.mark.skipif(not Path("scripts/tiny_models.py").exists(), reason="needs the repository's scripts")
TOKENS, CUTS = 23, [5, 2, 1, 1, 9, 5]


def tiny(family: str) -> PreTrainedModel:
    from scripts.tiny_models import tiny_config, tiny_model

    torch.manual_seed(0)
    model = tiny_model(tiny_config(family), "")
    model.set_experts_implementation("eager")  # no other takes float64
    return model


def with_bodies(model: PreTrainedModel) -> PreTrainedModel:
    for module in attention_layers(model).values():
        module.layer_idx = layer_number(module)
    for name, module in model.named_modules():
        if (body := states_body(type(module))) is not None:
            module.layer_idx = next(int(part) for part in name.split(".") if part.isdigit())
            module.forward = functools.partial(body, module)
    return model


def cache_for(family: str, model: PreTrainedModel) -> Cache:
    """What transformers would make; with layers of states for modules that have them elsewhere."""
    if family == "minimax":
        return Cache(layers=[DynamicLayer(), LinearAttentionLayer()])
    if family == "recurrent_gemma":
        return Cache(layers=[LinearAttentionLayer(), LinearAttentionLayer(), DynamicSlidingWindowLayer(7)])
    return DynamicCache(config=model.config)


def logits(model: PreTrainedModel, tokens: Tensor, **given: Any) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(tokens, **given).logits
    return made


def in_pieces(family: str, model: PreTrainedModel, tokens: Tensor, cuts: list[int]) -> Tensor:
    """Logits of pieces of texts. MiniMax's model takes any cache where it is told to use none."""
    cache, pieces, first = cache_for(family, model), [], 0
    for piece in tokens.split(cuts, 1):
        positions = torch.arange(first, first + piece.shape[1])[None]
        given = {"cache_params": cache} if "mamba" in family else {"past_key_values": cache, "position_ids": positions}
        pieces.append(logits(model, piece, use_cache=family != "minimax", **given))
        first += piece.shape[1]
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "zamba", "minimax", "recurrent_gemma"])
def test_a_model_runs_texts_in_pieces(family: str) -> None:
    """As near to transformers' own code in float64 as it is itself: at once or, where it can, token by token.

    By the root of the mean square: the largest error of a model is of few tokens, which amplify what came before them.
    """
    original = tiny(family)
    tokens = torch.randint(100, 256, (3, TOKENS))
    truth = logits(copy.deepcopy(original).double(), tokens, use_cache=False)
    theirs = [(logits(original, tokens, use_cache=False) - truth).abs()]
    if family not in ("minimax", "recurrent_gemma"):
        theirs.append((in_pieces(family, original, tokens, [1] * TOKENS) - truth).abs())
    mine = (in_pieces(family, with_bodies(copy.deepcopy(original)), tokens, CUTS) - truth).abs()
    assert mine.norm() <= 1.5 * max(each.norm() for each in theirs)
