"""When a patched model takes a tree for ``generate()``, as its mode says."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache

from prefixkit import TreeCache, patch, unpatch
from tests.models.generate.generating import SAMPLED, generate
from tests.models.tiny_families import VOCAB, make_model


def test_auto_takes_a_tree_where_rows_share(rng):
    model, ids = patch(make_model()), torch.from_numpy(rng.integers(3, VOCAB, (2, 50)))
    for options, tree in (({"do_sample": False}, False), (SAMPLED, True), ({"num_beams": 2}, True)):
        out = generate(model, {"input_ids": ids}, **options, return_dict_in_generate=True)
        assert isinstance(out.past_key_values, TreeCache) == tree, options
    ids = torch.from_numpy(rng.integers(3, VOCAB, (2, 50)))
    ids[1, :40] = ids[0, :40]
    out = generate(model, {"input_ids": ids}, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, TreeCache)


def test_never_takes_none_of_its_own(padded):
    model = patch(make_model(), tree_cache="never")
    out = generate(model, padded, **SAMPLED, return_dict_in_generate=True)
    assert type(out.past_key_values) is DynamicCache
    out = generate(model, padded, **SAMPLED, return_dict_in_generate=True, past_key_values=TreeCache(model))
    assert isinstance(out.past_key_values, TreeCache)


def test_patching_again_changes_the_mode_alone(padded):
    model = patch(make_model(), tree_cache="never")
    kinds = [type(module) for module in model.modules()]
    patch(model, tree_cache="always")
    assert [type(module) for module in model.modules()] == kinds
    out = generate(model, padded, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, TreeCache)


def test_another_mode_is_refused_before_anything_changes():
    model = make_model()
    with pytest.raises(ValueError, match=r"tree_cache must be one of 'auto', 'always', 'never', got 'sometimes'"):
        patch(model, tree_cache="sometimes")
    assert "prefixkit" not in type(model).__dict__.get("_prefixkit_original", "")


def test_unpatching_leaves_no_trace():
    model = make_model()
    cls, state = type(model), set(model.__dict__)
    unpatch(patch(model, tree_cache="always"))
    assert type(model) is cls
    assert set(model.__dict__) == state


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_patched_too(copied, padded):
    model = copied(patch(make_model(), tree_cache="always"))
    out = generate(model, padded, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, TreeCache)
    assert out.past_key_values.model is model
