"""Models that attend in chunks are on the tree until a row is longer than a chunk."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from prefixkit import TreeCache, patch, unpatch
from prefixkit.models.generate.forward import NotOnTree
from tests.models.generate.generating import BEAMS, NEW, SAMPLED, compared
from tests.models.tiny_families import VOCAB, make_model


def chunked(**overrides):
    """A model whose second layer has no rotary embedding."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "no_rope_layers": [1, 0]}
    return make_model("llama4_text", head_dim=16, **experts, **overrides)


@pytest.mark.parametrize("options", [SAMPLED, BEAMS, {"do_sample": False}])
@pytest.mark.parametrize("limits", [(40, 8192), (24, 8192), (8192, 30)])
def test_a_text_that_grows_past_its_chunk_goes_on_with_the_kv_of_before(options, limits, padded, said):
    """The second layer scales queries from ``floor_scale`` on."""
    model = chunked(attention_chunk_size=limits[0], floor_scale=limits[1])
    options = {**options, "eos_token_id": None}
    want, got, cache = compared(model, padded, **options)
    assert torch.equal(got, want)
    assert bool(said()) == (min(limits) < 20 + NEW - 1)
    assert all("a row comes to" in one for one in said())
    assert isinstance(cache, TreeCache) != bool(said())


def test_a_prompt_that_is_longer_than_a_chunk(padded, said):
    want, got, cache = compared(chunked(attention_chunk_size=15), padded, **SAMPLED)
    assert torch.equal(got, want)
    assert type(cache) is DynamicCache
    assert "a row comes to 20 tokens, and attention in chunks is causal for 15" in said()[0]


def test_padding_is_no_part_of_a_chunk(padded):
    model = chunked(attention_chunk_size=17)
    short = {name: given[1:] for name, given in padded.items()}
    want, got, cache = compared(model, short, do_sample=False, max_new_tokens=2)
    assert isinstance(cache, TreeCache)
    assert torch.equal(got, want)


def test_a_cache_of_ones_own_is_refused_and_stays_as_it_was(rng):
    model = patch(chunked(attention_chunk_size=12))
    ids, cache = torch.from_numpy(rng.integers(3, VOCAB, (2, 13))), TreeCache(model)
    with torch.no_grad():
        model(ids[:, :11], past_key_values=cache)
        with pytest.raises(NotOnTree, match="a row comes to 13 tokens, and attention in chunks is causal for 12"):
            model(ids[:, 11:], past_key_values=cache)
        got = model(ids[:, 11:12], past_key_values=cache).logits
        want = unpatch(model)(ids[:, :12]).logits[:, 11:]
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
