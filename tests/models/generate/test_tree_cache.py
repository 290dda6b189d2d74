"""A tree cache as an object: copied, pickled, looked at, given to the wrong model, and after a step that failed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache

from prefixkit.models import TreeCache, patch, unpatch
from prefixkit.models.model_errors import NotPatched
from prefixkit.testing.tiny import tiny_llama
from tests.models.tiny_families import make_model

IDS = torch.randint(5, 200, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    return patch(tiny_llama(), tree_cache="always")


def generated(model, ids, **options):
    fixed = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, return_dict_in_generate=True, **fixed | options)


def continued(out):
    """Its sequences, and two tokens more."""
    return torch.cat((out.sequences, torch.tensor([[9, 9], [8, 8]])), 1)


def test_a_copy_leaves_the_tree_as_its_original_does(model):
    out, plain = generated(model, IDS), generated(tiny_llama(), IDS)
    options = {"output_hidden_states": True}
    expected = generated(tiny_llama(), continued(plain), past_key_values=plain.past_key_values, **options)
    for cache in (copy.deepcopy(out.past_key_values), out.past_key_values):
        found = generated(model, continued(out), past_key_values=cache, **options)
        assert torch.equal(found.sequences, expected.sequences)


def test_a_copy_after_weights_changed_leaves_no_kv_of_the_old_ones(model):
    out = generated(model, IDS)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.neg_()
    copy.deepcopy(out.past_key_values).reset()
    found = generated(model, IDS, output_logits=True)
    want = generated(unpatch(model), IDS, output_logits=True)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(want.logits), rtol=3e-5, atol=3e-5)


def test_pickled_it_is_the_cache_of_transformers_with_its_kv(model):
    out, plain = generated(model, IDS), generated(tiny_llama(), IDS)
    loaded = pickle.loads(pickle.dumps(out.past_key_values))
    assert type(loaded) is DynamicCache
    for ours, theirs in zip(loaded.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


def test_its_layers_say_how_long_they_are(model):
    cache = generated(model, IDS).past_key_values
    assert [layer.get_seq_length() for layer in cache.layers] == [44, 44]


def test_a_model_that_is_not_patched_refuses_it(model):
    cache = generated(model, IDS).past_key_values
    with pytest.raises(NotPatched, match=r"does not take one: call prefixkit.patch\(model\)"), torch.no_grad():
        tiny_llama()(IDS[:, :1], past_key_values=cache)


@pytest.mark.parametrize("fails", [0, 1, 4])
def test_a_step_that_failed_can_be_made_again(model, fails):
    cache, failed, plain = TreeCache(model), [], DynamicCache()

    def fail(module, args):
        if not failed and cache.get_seq_length() >= 40 + fails - (fails == 0):
            failed.append(True)
            raise ZeroDivisionError

    handle = model.get_input_embeddings().register_forward_pre_hook(fail)
    steps = [IDS, *torch.randint(5, 200, (6, 2, 1), generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        for ids in steps:
            try:
                logits = model(ids, past_key_values=cache).logits
            except ZeroDivisionError:
                logits = model(ids, past_key_values=cache).logits
            torch.testing.assert_close(logits, tiny_llama()(ids, past_key_values=plain).logits, atol=1e-4, rtol=1e-4)
    handle.remove()
    assert failed


@pytest.mark.parametrize("kind", ["opt", "biogpt"])
def test_functional_dropout_in_training_mode_is_left_to_transformers(kind):
    plain = make_model(kind, seed=3)
    ours = patch(copy.deepcopy(plain), tree_cache="always")
    found = []
    for model in (plain, ours):
        model.train()
        torch.manual_seed(4)
        found.append(generated(model, IDS % 100).sequences)
    assert torch.equal(*found)


def test_a_mask_may_be_of_any_dtype(model):
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    expected = generated(tiny_llama(), IDS, attention_mask=mask).sequences
    for dtype in (torch.bool, torch.int32, torch.float16, torch.bfloat16):
        assert torch.equal(generated(model, IDS, attention_mask=mask.to(dtype)).sequences, expected)
