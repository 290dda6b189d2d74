"""Padded rows of models that get no positions from ``generate()``: they then count padding as text."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, GPT2LMHeadModel, LlamaForCausalLM, Ministral3ForCausalLM

from prefixkit import TreeCache, patch, unpatch
from tests.models.generate.generating import BEAMS, NEW, SAMPLED, compared, generate
from tests.models.tiny_families import make_model


class _Unplaced:
    def prepare_inputs_for_generation(self, *args, **kwargs):
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "position_ids": None}


class UnplacedLlama(_Unplaced, LlamaForCausalLM):
    """Has rotary embedding, to which distances alone matter."""


class UnplacedGPT2(_Unplaced, GPT2LMHeadModel):
    """Has an embedding of each position."""


class UnplacedMinistral3(_Unplaced, Ministral3ForCausalLM):
    """Scales queries by their position."""


CLASSES = {"llama": UnplacedLlama, "gpt2": UnplacedGPT2, "ministral3": UnplacedMinistral3}


def unplaced(family="llama", **options):
    model = make_model(family, **options)
    model.__class__ = CLASSES[family]
    return model


def states(model, inputs, **options):
    """What a call returns before and after the patch, with its cache."""
    for prepare in (unpatch, patch):
        prepare(model, **({} if prepare is unpatch else {"tree_cache": "always"}))
        yield generate(model, inputs, **{"eos_token_id": None, "return_dict_in_generate": True, **options})


@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLED, BEAMS], ids=["greedy", "samples", "beams"])
def test_with_rotary_embedding_rows_are_on_the_tree(options, padded):
    want, got, cache = compared(unplaced(), padded, **options)
    assert torch.equal(got, want)
    assert isinstance(cache, TreeCache)
    assert not cache.fell_back


def test_rows_share_what_is_behind_other_padding(padded):
    cache = compared(unplaced(), padded, do_sample=False, eos_token_id=None)[2]
    assert cache.kv_tokens == 20 + 15 + 11 - 6 + 3 * (NEW - 1)


def test_with_an_embedding_of_each_position_padding_counts(padded, said):
    model = unplaced("gpt2")
    want, got, cache = compared(model, padded, **SAMPLED)
    assert torch.equal(got, want)
    assert type(cache) is DynamicCache
    assert "without which padding counts as text" in said()[0]
    only = {name: of[:1] for name, of in padded.items()}
    want, got, cache = compared(model, only, **SAMPLED)
    assert torch.equal(got, want)
    assert isinstance(cache, TreeCache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "on_tree"), [("llama", True), ("gpt2", False)])
def test_rounding_to_16_bits_is_told_from_other_positions(dtype, family, on_tree, padded):
    *_, cache = compared(unplaced(family).to(dtype), padded, do_sample=False)
    assert isinstance(cache, TreeCache) == on_tree


def test_queries_that_are_scaled_by_their_position(padded, said):
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5}
    model = unplaced("ministral3", rope_parameters={**rope, "original_max_position_embeddings": 16})
    want, got, _ = compared(model, padded, do_sample=False)
    assert torch.equal(got, want)
    assert "without which padding counts as text" in said()[0]


def test_rows_that_outgrow_the_positions_that_a_model_knows(padded, said):
    want, got, cache = compared(unplaced(max_position_embeddings=20 + NEW - 2), padded, **SAMPLED)
    assert torch.equal(got, want)
    assert type(cache) is DynamicCache
    assert "without which padding counts as text" in said()[0]


def test_rotation_that_changes_with_the_longest_position(padded):
    short, long = [1.0] * 8, [4.0] * 8
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long, "factor": 8.0}
    rope["original_max_position_embeddings"] = 30  # between the padded lengths of prompt and text
    want, got, _ = compared(unplaced(head_dim=16, rope_parameters=rope), padded, do_sample=False, eos_token_id=None)
    assert torch.equal(got, want)


def test_what_leaves_the_tree_goes_on_as_the_model_counts(padded, said):
    model, again = unplaced(), []
    for first in states(model, padded, **SAMPLED):
        longer = torch.cat((first.sequences, torch.full((12, 1), 9)), 1)
        mask = torch.cat((padded["attention_mask"].repeat_interleave(4, 0), torch.ones(12, NEW + 1).long()), 1)
        inputs = {"input_ids": longer, "attention_mask": mask, "past_key_values": first.past_key_values}
        again.append(generate(model, inputs, do_sample=True, output_hidden_states=True))
    assert torch.equal(*again)
    assert "output_hidden_states" in said()[-1]


def test_kv_that_is_looked_at_or_pickled_is_that_of_the_models_positions(padded):
    stock, tree = (out.past_key_values for out in states(unplaced(), padded, do_sample=False))
    loaded = pickle.loads(pickle.dumps(tree))
    assert type(loaded) is DynamicCache
    for theirs, seen, one in zip(stock.layers, tree.layers, loaded.layers, strict=True):
        for got in (seen, one):
            torch.testing.assert_close(got.keys[:, :, 9:], theirs.keys[:, :, 9:])
            torch.testing.assert_close(got.values[:, :, 9:], theirs.values[:, :, 9:])


def test_a_copy_goes_on_by_itself(padded):
    model, again = unplaced(), []
    for first in states(model, padded, do_sample=False):
        longer = torch.cat((first.sequences, torch.full((3, 1), 9)), 1)
        mask = torch.cat((padded["attention_mask"], torch.ones(3, NEW + 1).long()), 1)
        cache = copy.deepcopy(first.past_key_values)
        inputs = {"input_ids": longer, "attention_mask": mask, "past_key_values": cache}
        again.append(generate(model, inputs, do_sample=False, output_hidden_states=True))
    assert torch.equal(*again)


def test_positions_that_come_for_later_tokens_alone(padded, said):
    model, found = unplaced(), []
    for first in states(model, padded, do_sample=False):
        mask = torch.cat((padded["attention_mask"], torch.ones(3, NEW).long()), 1)
        given = {"attention_mask": mask, "past_key_values": first.past_key_values}
        at = mask.cumsum(1)[:, -1:] - 1
        with torch.no_grad():
            found.append(model(first.sequences[:, -1:], position_ids=at, **given).logits)
    torch.testing.assert_close(*found)
    assert "given for a part of their tokens alone" in said()[-1]
