"""Models that attend in chunks are on the tree, whatever the length of a row."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from prefixkit import TreeCache, patch, unpatch
from tests.models.generate.generating import BEAMS, NEW, SAMPLED, compared
from tests.models.tiny_families import VOCAB, make_model


def chunked(**overrides):
    """A model whose second layer has no rotary embedding, and scales queries from ``floor_scale`` on."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "no_rope_layers": [1, 0]}
    return make_model("llama4_text", head_dim=16, **experts, **overrides)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("options", [SAMPLED, BEAMS, {"do_sample": False}])
@pytest.mark.parametrize("size", [40, 24, 15])
def test_texts_grow_past_their_chunk(options, size, padded, said):
    """Padding is no part of a chunk."""
    want, got, cache = compared(chunked(attention_chunk_size=size), padded, **{**options, "eos_token_id": None})
    assert torch.equal(got, want)
    assert not said()
    assert isinstance(cache, TreeCache)


@pytest.mark.parametrize("options", [SAMPLED, BEAMS, {"do_sample": False}])
def test_queries_are_scaled_by_their_position_in_texts_without_padding(options, padded, said):
    whole = {name: given[:1].repeat(2, 1) for name, given in padded.items()}
    whole["attention_mask"] = torch.ones_like(whole["attention_mask"])
    want, got, cache = compared(chunked(floor_scale=22), whole, **{**options, "eos_token_id": None})
    assert torch.equal(got, want)
    assert not said()
    assert isinstance(cache, TreeCache)


def test_where_padding_would_count_for_the_scale_rows_leave_the_tree(padded, said):
    want, got, cache = compared(chunked(floor_scale=30), padded, **{**SAMPLED, "eos_token_id": None})
    assert torch.equal(got, want)
    assert (type(cache) is DynamicCache) == (20 + NEW - 1 > 29)
    assert "the model scales queries after 29 tokens, padding counted" in said()[0]


def test_a_cache_of_ones_own_goes_past_a_chunk(rng):
    model = patch(chunked(attention_chunk_size=12))
    ids, cache = torch.from_numpy(rng.integers(3, VOCAB, (2, 13))), TreeCache(model)
    with torch.no_grad():
        model(ids[:, :11], past_key_values=cache)
        got = model(ids[:, 11:], past_key_values=cache).logits
        want = unpatch(model)(ids).logits[:, 11:]
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
