"""What the memory of weights holds: which tensors are compared, and that comparing holds on to none of them."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch

import prefixkit
from prefixkit.models.weights.content import kv_version
from prefixkit.testing.tiny import tiny_llama


def many() -> int:
    """Tokens whose KV is worth comparing all weights for."""
    return 1 << 20


@pytest.fixture
def model():
    """Not small enough to be compared whole at each call."""
    return tiny_llama(vocab_size=8192)


def test_a_model_that_only_runs_keeps_its_version(model):
    version = kv_version(model, many)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert kv_version(model, many) == version == kv_version(model)
    assert hash(kv_version(model)) == hash(version)


def test_copies_of_a_model_have_versions_of_their_own(model):
    assert kv_version(copy.deepcopy(model)) != kv_version(model)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_any_single_bit_counts_where_all_weights_are_compared(model, name):
    seed = torch.seed() % 2**32
    print(f"seed {seed}")
    places = torch.Generator().manual_seed(seed)
    words = model.get_parameter(name).data.view(torch.int32).flatten()
    for bit in (0, 15, 31):
        version = kv_version(model, many)
        words[torch.randint(len(words), (1,), generator=places)] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert kv_version(model, many) != version


def test_equal_rows_in_another_order_count(model):
    version = kv_version(model, many)
    weight = model.model.embed_tokens.weight.data
    weight[:] = weight[torch.randperm(len(weight))]
    assert kv_version(model, many) != version


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool])
@pytest.mark.parametrize("size", [1, 3, 40001])
def test_buffers_of_every_dtype_and_size_are_compared(dtype, size):
    module = tiny_llama()
    module.register_buffer("values", torch.zeros(size + 1, dtype=dtype)[1:])  # which need not begin at a whole word
    version = kv_version(module)
    module.values.data[-1] = 1
    assert kv_version(module) != version


def test_strided_tensors_are_compared_from_their_first_element_to_their_last():
    module = tiny_llama()
    module.register_buffer("values", torch.zeros(30, 50).t()[::2])
    version = kv_version(module)
    module.values.data[-1, -1] = 1
    assert kv_version(module) != version


def test_weights_are_not_kept_alive(model):
    kv_version(model, many)
    gone, weight = [], model.model.layers[0].mlp.up_proj.weight
    weakref.finalize(weight.untyped_storage(), gone.append, True)
    weight.data = torch.zeros(96, 64)
    gc.collect()
    assert gone, "its first memory is freed while the model lives on"
    kv_version(model, many)


@pytest.mark.parametrize("empty", ["resized", "meta"])
def test_weights_without_memory_are_passed_over(model, empty):
    """Shards free the memory of parameters that are gathered for a step, and offloaded ones have none."""
    kv_version(model, many)
    parameter = model.model.layers[0].mlp.up_proj.weight
    if empty == "resized":
        parameter.untyped_storage().resize_(0)
    else:
        model.model.layers[0].mlp.up_proj.to("meta")
    version = kv_version(model, many)
    assert kv_version(model, many) == version


def test_sparse_and_inference_tensors(model):
    with torch.inference_mode():
        model.register_buffer("made", torch.ones(8))
    model.register_buffer("sparse", torch.eye(4).to_sparse())
    version = kv_version(model)
    assert kv_version(model) == version
    with torch.inference_mode():
        model.made.mul_(2)
    assert kv_version(model) != version


def test_threads_may_ask_at_once(model):
    version, seen = kv_version(model, many), []
    threads = [threading.Thread(target=lambda: seen.append(kv_version(model, many))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {version}


def test_patching_and_packing_leave_the_version(model):
    version = kv_version(model, many)
    prefixkit.patch(model)
    with prefixkit.Session(model, None, kv_budget="1MiB") as session:
        session.generate([[1, 2, 3]], max_new_tokens=2)
        assert kv_version(model, many) == version
    prefixkit.unpatch(model)
    assert kv_version(model, many) == version
