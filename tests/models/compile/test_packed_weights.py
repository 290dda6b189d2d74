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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from prefixkit.models import is_patched, patch, patched, unpatch
from prefixkit.models.compile.packed_weights import movable, moves, pack, packed_view, unpack
from prefixkit.models.weights.state import weights_places
from tests.models.compile.decode import Decode
from tests.models.compile.weights import groups_of, storage_bytes
from tests.models.driver import TreeDriver
from tests.models.tiny_families import make_model


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


def test_unpacked_weights_own_their_memory_and_none_of_the_packed_one_is_left(weights):
    weights[1].requires_grad_(False)
    before = [(weight.detach().clone(), weight.requires_grad) for weight in weights]
    whole = StorageWeakRef(pack(weights).untyped_storage())
    unpack(weights)
    assert whole.expired()
    assert packed_view(weights) is None
    assert movable(weights), "no other tensor holds their memory"
    for weight, (value, requires_grad) in zip(weights, before, strict=True):
        assert torch.equal(weight, value) and weight.stride() == value.stride()
        assert weight.dtype == value.dtype and weight.requires_grad == requires_grad and weight.is_leaf
        assert weight.untyped_storage().nbytes() == weight.nbytes and weight.storage_offset() == 0
        assert weight.untyped_storage().resizable(), "as memory that torch allocates is"
    at = [weight.data_ptr() for weight in weights]
    unpack(weights)
    assert [weight.data_ptr() for weight in weights] == at, "those that are not packed stay"


def test_parameters_born_in_inference_mode_are_unpacked_as_such():
    with torch.inference_mode():
        weights = [nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    pack(weights)
    unpack(weights)
    assert packed_view(weights) is None
    assert all(weight.is_inference() for weight in weights)


def test_parameters_that_were_tied_while_packed_stay_tied(weights):
    pack(weights)
    tied = nn.Parameter(weights[0].data)
    unpack([*weights, tied])
    with torch.no_grad():
        tied.fill_(3.0)
    assert (weights[0] == 3.0).all()


def test_weights_that_were_moved_since_stay_where_they_are(weights):
    pack(weights)
    weights[1].data = torch.zeros(4, 8)
    at = weights[1].data_ptr()
    unpack(weights)
    assert weights[1].data_ptr() == at
    assert all(movable([weight]) for weight in weights)


def test_moves_are_counted_so_that_graphs_are_captured_again(weights):
    before = moves()
    pack(weights)
    assert moves() == before + 1
    unpack(weights)
    assert moves() == before + 2


class Copies(TorchDispatchMode):
    """Bytes of the storages that operations meet for the first time in this block, for as long as they live."""

    def __init__(self, known, on_operation):
        super().__init__()
        self.known, self.on_operation, self.met = known, on_operation, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in (result, *args):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.met[storage._cdata] = StorageWeakRef(storage)
                self.sizes[storage._cdata] = storage.nbytes()
        self.on_operation()
        return result

    sizes: dict = {}

    def bytes(self):
        return sum(self.sizes[handle] for handle, ref in self.met.items() if not ref.expired())


def test_one_pack_at_most_is_in_memory_twice_while_weights_are_unpacked():
    """Whatever the order in which the weights come."""
    packs = [[nn.Parameter(torch.randn(4, 8)) for _ in range(3)] for _ in range(5)]
    wholes = [StorageWeakRef(pack(weights).untyped_storage()) for weights in packs]
    size = sum(weight.nbytes for weight in packs[0])
    in_memory = []
    # Weak references keep handles unique.
    parts = [StorageWeakRef(weight.untyped_storage()) for weights in packs for weight in weights]
    copies = Copies(
        {part.cdata for part in parts},
        lambda: in_memory.append(copies.bytes() + size * sum(not whole.expired() for whole in wholes)),
    )
    with copies:
        unpack([weights[number] for number in range(3) for weights in packs])
    assert all(whole.expired() for whole in wholes)
    assert copies.bytes() == 5 * size, "the copies are what the weights lie in now"
    assert max(in_memory) == 6 * size


# -- models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    """A Llama that was run compiled, a step of it, and what that said."""
    torch._dynamo.reset()
    decode = Decode(TreeDriver, make_model("llama"), np.random.default_rng(1))
    runner, step = decode.runner(), decode.step()
    logits = runner(step)
    assert all(len(groups) == 3 for groups in groups_of(decode.driver.model))
    return decode.driver.model, runner, step, logits


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


def test_a_pickle_computes_the_same_and_moves_its_weights_too(llama, dynamo, rng):
    model, _, _, _ = llama
    decode = Decode(TreeDriver, pickle.loads(pickle.dumps(model)), rng)
    step = decode.step()
    assert torch.equal(decode.runner()(step), decode.driver.runner(step))
    assert all(len(groups) == 3 for groups in groups_of(decode.driver.model))
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
    assert all(len(groups) == 3 for groups in groups_of(model))


def test_places_tell_of_weights_that_moved_and_of_no_others(llama):
    model, runner, step, _ = llama
    before = weights_places(model)
    runner(step)
    with torch.no_grad():
        model.model.norm.weight.mul_(1)
    assert weights_places(model) == before
    assert set(before.values) >= {parameter.data_ptr() for parameter in model.parameters()}
    for change in (
        lambda: model.double().float(),
        lambda: setattr(model.model, "norm", copy.deepcopy(model.model.norm)),
    ):
        change()
        assert weights_places(model) != before
        before = weights_places(model)


def test_unpatch_gives_every_weight_its_own_memory_back(dynamo, rng, tmp_path):
    decode = Decode(TreeDriver, make_model("qwen2"), rng)  # with biases
    model = decode.driver.model
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    at, size = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}, storage_bytes(model)
    model.save_pretrained(tmp_path / "before")
    decode.runner()(decode.step())
    moved = [name for name, parameter in model.named_parameters() if parameter.data_ptr() != at[name]]
    assert len(moved) == 16, "weights and biases of q, k and v in both layers, weights of gate and up"
    packed = [StorageWeakRef(model.get_parameter(name).untyped_storage()) for name in moved]
    at = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    unpatch(model)
    assert not is_patched(model)
    assert all(storage.expired() for storage in packed)
    assert groups_of(model) == [[], []]
    for name, parameter in model.named_parameters():
        same, value = before[name]
        assert parameter is same and torch.equal(parameter, value) and parameter.dtype == value.dtype
        assert parameter.requires_grad and parameter.is_leaf and not parameter.is_inference()
        assert parameter.stride() == value.stride() and parameter.storage_offset() == 0
        assert (parameter.data_ptr() == at[name]) == (name not in moved), "no other weight is touched"
        if name in moved:
            assert movable([parameter]) and parameter.untyped_storage().nbytes() == parameter.nbytes
    assert storage_bytes(model) == size
    model.save_pretrained(tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / path.name).read_bytes() == path.read_bytes()


def test_a_model_may_be_patched_compiled_and_unpatched_again(dynamo, rng):
    decode = Decode(TreeDriver, make_model("llama"), rng)
    model = decode.driver.model
    runner, step = decode.runner(), decode.step()
    expected, where = runner(step), weights_places(model)
    patch(unpatch(model))
    assert weights_places(model) != where, "graphs over the packed weights must not be replayed"
    assert torch.equal(decode.runner()(step), expected)
    assert all(len(groups) == 3 for groups in groups_of(model))


def test_the_context_manager_unpacks_what_was_packed_in_its_block(dynamo, rng):
    decode = Decode(TreeDriver, make_model("llama"), rng)
    model, step = unpatch(decode.driver.model), decode.step()
    with patched(model):
        decode.runner()(step)
        assert all(len(groups) == 3 for groups in groups_of(model))
        with patched(model):
            pass
        assert all(len(groups) == 3 for groups in groups_of(model)), "it was patched before"
    assert groups_of(model) == [[], []]


def test_an_unpatched_model_computes_and_learns_as_before(dynamo, rng):
    decode = Decode(TreeDriver, make_model("llama"), rng)
    model, tokens = decode.driver.model, torch.arange(3, 9)[None]
    expected = model(tokens).logits
    decode.runner()(decode.step())
    logits = unpatch(model)(tokens).logits
    assert torch.equal(logits, expected)
    logits.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
