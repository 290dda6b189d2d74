"""Packed weights: which may be moved, and that copying, saving and loading a model finds each of them once."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_model
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from transformers import AutoModelForCausalLM

import prefixkit.models.compiled as compiled_module
from prefixkit.models import unpatch
from prefixkit.models.joint import movable
from tests.models.conftest import TreeDriver, make_model
from tests.models.test_compiled import Decode
from tests.models.test_fused import groups_of, storage_bytes


@pytest.fixture
def weights():
    return [nn.Parameter(torch.randn(4, 8)) for _ in range(3)]


def test_weights_that_no_other_tensor_holds(weights):
    assert movable(weights)


def test_weights_that_another_tensor_holds(weights):
    held = weights[1].detach()
    assert not movable(weights)
    del held
    assert movable(weights)


def test_a_weight_cannot_lie_in_two_places(weights):
    """Counted twice, it would hide another tensor that holds its memory."""
    held = weights[0].detach()
    assert not movable([weights[0], *weights])
    del held
    assert not movable([weights[0], *weights])


def test_memory_that_other_processes_share_stays(weights):
    weights[2].data.share_memory_()
    assert not movable(weights)


# -- models --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    """A Llama that was run compiled, a step of it, and what that said."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiled_module, "inductor", lambda graph, inputs: aot_eager(graph, inputs))
        decode = Decode(TreeDriver, make_model("llama"), np.random.default_rng(1))
        runner, step = decode.runner(), decode.step()
        logits = runner(step)
        assert all(len(groups) == 2 for groups in groups_of(decode.driver.model))
        yield decode.driver.model, runner, step, logits


def test_a_copy_has_memory_of_its_own(llama):
    model, _, _, _ = llama
    ours, size = model.state_dict(), storage_bytes(model)
    for duplicate in (copy.deepcopy(model), _loaded(_saved(model))):
        theirs = duplicate.state_dict()
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)
        assert not _storages(theirs) & _storages(ours)
        assert storage_bytes(duplicate) == size
    assert len(_saved(model)) < len(_saved(copy.deepcopy(model))) + 1000, "packed memory is written once"


def _storages(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def _loaded(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def test_a_pickle_computes_the_same_and_moves_its_weights_too(llama, traced, rng):
    model, _, _, _ = llama
    decode = Decode(TreeDriver, pickle.loads(pickle.dumps(model)), rng)
    step = decode.step()
    assert torch.equal(decode.runner()(step), decode.driver.runner(step))
    assert all(len(groups) == 2 for groups in groups_of(decode.driver.model))
    assert storage_bytes(decode.driver.model) == storage_bytes(model)


def test_a_saved_model_has_each_weight_whatever_tool_saves_it(llama, tmp_path):
    """Even a tool that takes weights with one storage for the same weight."""
    model, _, _, _ = llama
    Accelerator(cpu=True).save_model(model, tmp_path / "accelerate")
    save_model(model, tmp_path / "model.safetensors")
    for place in (tmp_path / "accelerate" / "model.safetensors", tmp_path / "model.safetensors"):
        assert load_file(place).keys() == dict(model.named_parameters()).keys()
    weight = model.model.layers[0].self_attn.k_proj.weight
    assert len(pickle.dumps(weight)) < weight.nbytes + 1000, "and nothing beside it"


@pytest.mark.parametrize("shard", ["1GB", "50KB"])
def test_a_saved_model_has_each_weight_once(shard, llama, tmp_path):
    model, _, _, _ = llama
    model.save_pretrained(tmp_path, max_shard_size=shard)
    files = [path.read_bytes() for path in tmp_path.glob("*.safetensors")]
    assert len(files) > 1 or shard == "1GB"
    headers = sum(8 + int.from_bytes(data[:8], "little") for data in files)
    assert sum(map(len, files)) - headers == sum(parameter.nbytes for parameter in model.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = loaded.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
    del theirs
    assert all(movable([parameter]) for parameter in loaded.parameters()), "and could be moved again"


def test_a_state_dict_loads_in_place_and_is_seen(llama):
    model, runner, step, logits = llama
    at = [parameter.data_ptr() for parameter in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: value * 1.5 for name, value in before.items()})
    assert not torch.equal(runner(step), logits)
    model.load_state_dict(before)
    assert torch.equal(runner(step), logits)
    assert [parameter.data_ptr() for parameter in model.parameters()] == at


def test_a_model_that_was_converted_is_packed_again(llama):
    model, runner, step, logits = llama
    model.double().float()
    assert all(not groups for groups in groups_of(model))
    assert torch.equal(runner(step), logits)
    assert all(len(groups) == 2 for groups in groups_of(model))


def test_addresses_tell_of_weights_that_moved_and_of_no_others(llama):
    model, runner, step, _ = llama
    before = runner.addresses()
    runner(step)
    with torch.no_grad():
        model.model.norm.weight.mul_(1)
    assert runner.addresses() == before
    assert set(before) >= {parameter.data_ptr() for parameter in model.parameters()}
    for change in (
        lambda: model.double().float(),
        lambda: setattr(model.model, "norm", copy.deepcopy(model.model.norm)),
    ):
        change()
        assert runner.addresses() != before
        before = runner.addresses()


def test_an_unpatched_model_computes_and_learns_as_before(traced, rng):
    decode = Decode(TreeDriver, make_model("llama"), rng)
    model, tokens = decode.driver.model, torch.arange(3, 9)[None]
    expected = model(tokens).logits
    decode.runner()(decode.step())
    logits = unpatch(model)(tokens).logits
    assert torch.equal(logits, expected)
    logits.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
