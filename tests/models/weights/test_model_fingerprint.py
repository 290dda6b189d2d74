"""Fingerprints of models: what they depend on, and that those of campaigns that exist stay."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

from prefixkit.models import patch
from prefixkit.models.weights.model_fingerprint import kv_fingerprint, model_fingerprint
from prefixkit.testing.tiny import tiny_llama


def test_run_folders_that_exist_have_these():
    layer = nn.Linear(32, 24)
    layer.load_state_dict({"weight": torch.arange(768.0).view(24, 32), "bias": torch.arange(24.0)})
    assert model_fingerprint(layer, ()) == "72ae14d672dd7c8f93ddd6befa3b555c26652ad044111c540c57e7ac9a7206a2"
    assert model_fingerprint(layer, (7, 3)) == "4903bae14345e07a9e587cf115f47f33b2a8686ab7bdeb4dcd947999e7d94094"


@pytest.mark.parametrize("kind", [lambda model: model_fingerprint(model, (1,)), kv_fingerprint], ids=["model", "kv"])
def test_other_weights_and_shapes_have_another_and_a_patch_has_not(kind):
    first = kind(tiny_llama())
    assert kind(tiny_llama()) == first
    assert kind(patch(tiny_llama())) == first
    assert kind(tiny_llama(seed=1)) != first
    assert kind(tiny_llama().bfloat16()) != first
    assert kind(tiny_llama(intermediate_size=64)) != first


def test_kv_depends_on_rotary_embeddings_and_not_on_stop_tokens():
    first = kv_fingerprint(tiny_llama())
    assert kv_fingerprint(tiny_llama(eos_token_id=3, use_cache=False)) == first
    assert kv_fingerprint(tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})) != first


def test_kv_depends_on_the_adapters_that_are_active_and_how():
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(), config)
    model.add_adapter("other", config)
    first = kv_fingerprint(model)
    with model.disable_adapter():
        assert kv_fingerprint(model) != first
    model.set_adapter("other")
    assert kv_fingerprint(model) != first
    model.set_adapter("default")
    assert kv_fingerprint(model) == first
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] *= 2
    assert kv_fingerprint(model) != first
