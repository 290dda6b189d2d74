"""The version of a model's weights: which changes it sees, each alone, and what leaves it as it was."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import prefixkit
from prefixkit.models.compile.packed_weights import movable, pack, unpack
from prefixkit.models.weights.content import kv_version
from prefixkit.models.weights.state import weights_places
from prefixkit.testing.tiny import tiny_llama

PROMPTS = [[1, 2, 3, 4], [1, 2, 5]]


@pytest.fixture
def model():
    return tiny_llama()


def projections(model):
    attention = model.model.layers[0].self_attn
    return [layer.weight for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]


# -- what leaves it as it was ------------------------------------------------------------------------------------------


def test_nothing_changed(model):
    version = kv_version(model)
    assert kv_version(model) == version
    assert hash(kv_version(model)) == hash(version)


def test_a_forward_and_a_backward_pass(model):
    version = kv_version(model)
    model(torch.tensor([PROMPTS[0]])).logits.sum().backward()
    assert kv_version(model) == version


def test_sampling_and_patching():
    model = tiny_llama()
    version = kv_version(model)
    prefixkit.patch(model)
    for _ in range(2):
        prefixkit.generate(model, None, PROMPTS, n=2, max_new_tokens=3)
        assert kv_version(model) == version
    prefixkit.unpatch(model)
    assert kv_version(model) == version


def test_packing_and_unpacking_copies_values_and_changes_none(model):
    weights = projections(model)
    version, places = kv_version(model), weights_places(model)
    pack(weights)
    assert kv_version(model) == version
    assert weights_places(model) != places, "graphs read the weights elsewhere now"
    unpack(weights)
    assert kv_version(model) == version
    pack(weights)
    unpack(weights)
    assert kv_version(model) == version


def test_weights_over_one_memory_that_are_packed():
    layer = nn.Linear(8, 12, bias=False)
    parts = nn.ParameterList([nn.Parameter(part) for part in torch.split(layer.weight.data, 4)])
    del layer
    version = kv_version(parts)
    pack(list(parts))
    assert kv_version(parts) == version
    unpack(list(parts))
    assert kv_version(parts) == version


def test_weights_that_were_asked_about_can_still_be_packed(model):
    kv_version(model)
    assert movable(projections(model))


def test_a_conversion_to_what_a_model_is_already(model):
    version = kv_version(model)
    model.to("cpu", torch.float32)
    assert kv_version(model) == version


def test_it_does_not_keep_weights_alive():
    model = nn.Linear(4, 4)
    version, gone = kv_version(model), []
    torch.utils.weak.weakref.finalize(model.weight, gone.append, True)
    del model
    gc.collect()
    assert gone
    assert version == version and hash(version)


# -- what was written to -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_one_parameter_written_to_in_place(model, name, guard):
    version = kv_version(model)
    with guard():
        model.get_parameter(name)[0].mul_(1.5)
    assert kv_version(model) != version


def test_a_buffer_written_to_in_place(model):
    version = kv_version(model)
    model.model.rotary_emb.inv_freq.mul_(2)
    assert kv_version(model) != version


def test_a_state_dict_that_was_loaded(model):
    version = kv_version(model)
    model.load_state_dict(tiny_llama(seed=1).state_dict())
    assert kv_version(model) != version


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_of_an_optimizer(model, kind, options):
    """Fused ones write to parameters and leave torch's version counters as they are."""
    optimizer = kind(model.parameters(), lr=1e-3, **options)
    model(torch.tensor([PROMPTS[0]])).logits.sum().backward()
    seen = {kv_version(model)}
    for steps in range(2, 4):
        optimizer.step()
        seen.add(kv_version(model))
        assert len(seen) == steps


def test_a_step_of_an_optimizer_over_packed_weights(model):
    weights = projections(model)
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    pack(weights)
    version = kv_version(model)
    model(torch.tensor([PROMPTS[0]])).logits.sum().backward()
    optimizer.step()
    changed = kv_version(model)
    assert changed != version
    unpack(weights)
    assert kv_version(model) == changed


def test_a_step_of_an_optimizer_over_other_weights(model):
    version, other = kv_version(model), nn.Linear(4, 4)
    other(torch.randn(2, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert kv_version(model) == version


# -- what lies elsewhere -----------------------------------------------------------------------------------------------


def test_a_parameter_that_was_replaced(model):
    version, other = kv_version(model), copy.deepcopy(model.model.norm.weight)
    other.data[3] += 1  # a write that torch does not count
    model.model.norm.weight = other
    assert kv_version(model) != version


def test_memory_that_was_given_out_again(model):
    """An address of before, with as many writes as before, is other memory."""
    weight = model.model.norm.weight
    version, places, elsewhere = kv_version(model), weights_places(model), []
    for _ in range(1000):
        weight.data = torch.rand(len(weight))
        if weights_places(model) == places:
            break
        elsewhere.append(weight.data)
    assert kv_version(model) != version


def test_another_parameter_over_the_same_memory(model):
    """It counts its own writes, of which there may be as many by now."""
    norm = model.model.norm
    norm.weight = nn.Parameter(norm.weight.data)
    version = kv_version(model)
    norm.weight = nn.Parameter(norm.weight.data)
    assert kv_version(model) == version
    norm.weight.data[3] = 2
    assert kv_version(model) != version


def test_other_memory_with_the_same_values(model):
    version = kv_version(model)
    model.lm_head.weight.data = model.lm_head.weight.clone()
    model.model.embed_tokens.weight.untyped_storage().resize_(2**20)
    assert kv_version(model) == version


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.flip(0),
        lambda weight: weight.data.T,
        lambda weight: weight.data.view(torch.int32),
        lambda weight: weight.data[:-1],
        lambda weight: weight.data.bfloat16(),
    ],
    ids=["memory", "stride", "dtype", "shape", "conversion"],
)
def test_other_data_of_the_same_parameter(change):
    layer = nn.Linear(8, 8, bias=False)
    layer.weight.requires_grad_(False)
    version = kv_version(layer)
    layer.weight.data = change(layer.weight)
    assert kv_version(layer) != version


def test_modules_in_another_order(model):
    version = kv_version(model)
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    assert kv_version(model) != version
    layers[0], layers[1] = layers[1], layers[0]
    assert kv_version(model) == version


def test_a_copy_of_a_model_is_another(model):
    assert kv_version(copy.deepcopy(model)) != kv_version(model)


def test_weights_without_memory_or_counters():
    with torch.device("meta"):
        meta = tiny_llama()
    with torch.inference_mode():
        inference = tiny_llama()
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    for model in (meta, inference, sparse):
        version = kv_version(model)
        assert kv_version(model) == version
    inference.model.norm.weight.data = torch.ones(64)
    assert kv_version(inference) != kv_version(meta)
    with torch.no_grad():
        version = kv_version(sparse)
        sparse.weight.mul_(2)
    assert kv_version(sparse) != version


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("fused", [False, True])
def test_sharded_weights(fused, mesh):
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh))
    seen = {kv_version(model)}
    assert kv_version(model) in seen
    with torch.no_grad():
        model.weight.mul_(2)
    seen.add(kv_version(model))
    with torch.no_grad():
        model.weight.to_local().mul_(2)
    seen.add(kv_version(model))
    model.weight.grad = torch.ones_like(model.weight)
    torch.optim.AdamW([model.weight], fused=fused).step()
    seen.add(kv_version(model))
    assert len(seen) == 4


# -- modes -------------------------------------------------------------------------------------------------------------


def test_dropout_that_is_switched_on_and_off_again():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    version = kv_version(model)
    model[1].train()
    assert kv_version(model) != version
    model.eval()
    assert kv_version(model) == version
