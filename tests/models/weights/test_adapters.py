"""The version of the weights of a model with adapters: each change of an adapter gives another."""

from __future__ import annotations

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers.integrations.peft import MIN_PEFT_VERSION

from prefixkit.models.weights.content import kv_version
from prefixkit.models.weights.state import weights_places
from prefixkit.testing.tiny import tiny_llama


@pytest.fixture
def model():
    return tiny_llama()


def with_adapters(*names, **options):
    """A tiny Llama with LoRA adapters, the first of them active."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    model = peft.get_peft_model(tiny_llama(), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    return model.eval()


def tuner_layers(model):
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def test_adapters_that_are_added_and_removed():
    model = with_adapters("a")
    version = kv_version(model)
    model.add_adapter("b", model.peft_config["a"])
    added = kv_version(model)
    assert added != version
    model.delete_adapter("b")
    assert kv_version(model) != added


def test_adapters_that_transformers_adds(model):
    pytest.importorskip("peft", MIN_PEFT_VERSION)
    version = kv_version(model)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    added = kv_version(model)
    assert added != version
    model.disable_adapters()
    assert kv_version(model) != added
    model.enable_adapters()
    assert kv_version(model) == added


def test_an_adapter_that_takes_the_place_of_another():
    model = with_adapters("a", "b")
    version, places = kv_version(model), weights_places(model)
    model.set_adapter("b")
    assert kv_version(model) != version
    assert weights_places(model) != places, "a graph captured with the other adapter is wrong now"
    model.set_adapter("a")
    assert kv_version(model) == version
    assert weights_places(model) == places


def test_adapters_that_are_disabled():
    model = with_adapters("a", modules_to_save=["lm_head"])
    version = kv_version(model)
    with model.disable_adapter():
        assert kv_version(model) != version
    assert kv_version(model) == version


def test_an_adapter_of_another_scale():
    model = with_adapters("a")
    version = kv_version(model)
    tuner_layers(model)[0].scaling["a"] *= 2
    assert kv_version(model) != version
    tuner_layers(model)[0].scaling["a"] /= 2
    assert kv_version(model) == version


def test_a_weight_of_an_adapter_written_to_in_place():
    model = with_adapters("a")
    version = kv_version(model)
    with torch.no_grad():
        tuner_layers(model)[1].lora_B["a"].weight.add_(1)
    assert kv_version(model) != version


@pytest.mark.parametrize("safe", [False, True])
def test_merging_and_undoing_it_leaves_other_weights_each_time(safe):
    """Merging writes through ``.data``, and what is subtracted again is rounded."""
    model, seen = with_adapters("a"), set()

    def note():
        weights = torch.cat([one.data.flatten() for one in model.parameters()])
        seen.add((kv_version(model), weights.numpy().tobytes()))

    for _ in range(2):
        note()
        model.merge_adapter(safe_merge=safe)
        note()
        model.unmerge_adapter()
    note()
    versions, weights = zip(*seen, strict=True)
    assert len(seen) == len({*versions}) == len({*weights}) > 2, "a version for each of these weights"


def test_adapters_that_become_part_of_the_weights():
    model = with_adapters("a")
    version = kv_version(model)
    assert kv_version(model.merge_and_unload()) != version
