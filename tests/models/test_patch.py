"""Patching changes classes of attention modules and nothing else; unpatching leaves no trace."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from transformers import DynamicCache, StaticCache

from prefixkit.models import is_patched, kv_spec, patch, patched, unpatch

CORE = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2"]


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


def everything(model):
    """All that a patch could leave behind."""
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_state_dict_hooks",
        "_load_state_dict_pre_hooks",
    )
    modules = {
        name: (type(module), dict(vars(module)), {hook: dict(vars(module)[hook]) for hook in hooks})
        for name, module in model.named_modules()
    }
    tensors = {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.state_dict(keep_vars=True).items()}
    return modules, tensors, repr(model), model.config.to_json_string()


@pytest.mark.parametrize("model_type", CORE)
def test_unpatch_leaves_no_trace(model_type, tiny):
    model = tiny(model_type)
    before, bytes_before = everything(model), pickle.dumps(model)
    assert patch(model) is model
    assert is_patched(model)
    assert unpatch(model) is model
    assert not is_patched(model)
    assert everything(model) == before
    assert pickle.dumps(model) == bytes_before


def test_a_run_leaves_no_trace_either(tiny, drive, rng):
    model = tiny()
    run = drive(model)
    before = everything(run.model)
    run.tree.insert(rng.integers(3, 128, 12))
    run.run()
    assert everything(run.model) == before


def test_a_patched_model_looks_like_the_original(tiny):
    model, original = tiny(seed=5), tiny(seed=5)
    patch(model)
    assert repr(model) == repr(original)
    assert list(model.state_dict()) == list(original.state_dict())
    assert model.config.to_dict() == original.config.to_dict()
    for ours, theirs in zip(attentions(model), attentions(original), strict=True):
        assert isinstance(ours, type(theirs))
        assert type(ours) is not type(theirs)
        assert (type(ours).__name__, type(ours).__module__) == (type(theirs).__name__, type(theirs).__module__)
    assert model._can_set_attn_implementation()
    model.set_attn_implementation("sdpa")


def test_patching_twice_is_patching_once(tiny):
    model = patch(tiny())
    classes = [type(module) for module in attentions(model)]
    assert patch(model) is model
    assert [type(module) for module in attentions(model)] == classes
    unpatch(model)
    assert not is_patched(model)


def test_unpatching_an_unpatched_model_does_nothing(tiny):
    model = tiny()
    before = everything(model)
    assert unpatch(model) is model
    assert everything(model) == before
    assert not is_patched(3)
    with pytest.raises(TypeError, match="expected a model, got int"):
        unpatch(3)


def test_patch_completes_a_model_of_which_one_layer_was_replaced(tiny):
    model = patch(tiny(seed=1))
    model.model.layers[1] = tiny(seed=2).model.layers[1]
    patch(model)
    assert len({type(module) for module in attentions(model)}) == 1


def test_the_context_manager_patches_for_its_block(tiny):
    model = tiny()
    before = everything(model)
    with patched(model) as inside:
        assert inside is model
        assert is_patched(model)
    assert everything(model) == before


def test_an_error_in_the_block_unpatches_too(tiny):
    model = tiny()
    with pytest.raises(ZeroDivisionError), patched(model):
        1 / 0  # noqa: B018
    assert not is_patched(model)


def test_the_context_manager_leaves_a_patched_model_patched(tiny):
    model = patch(tiny())
    with patched(model):
        pass
    assert is_patched(model)


def test_a_patch_that_fails_half_way_is_undone(tiny):
    model = tiny()
    second = attentions(model)[1]

    class KeepsItsClass(type(second)):
        def __setattr__(self, name, value):
            if name == "__class__":
                raise MemoryError
            super().__setattr__(name, value)

    second.__class__ = KeepsItsClass
    before = everything(model)
    with pytest.raises(MemoryError):
        patch(model)
    assert everything(model) == before
    assert not is_patched(model)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_patched_model_can_be_copied(duplicate, tiny, drive, dense_logits, rng):
    model = tiny()
    other = duplicate(patch(model))
    assert is_patched(other)
    tokens = rng.integers(3, 128, 10).tolist()
    run = drive(other)
    run.tree.insert(tokens)
    run.run()
    assert torch.allclose(run.logits_of(tokens), dense_logits(model, tokens), atol=1e-4)
    unpatch(other)
    assert is_patched(model)
    assert not is_patched(other)


def test_a_patched_model_saves_what_the_original_saves(tiny, tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "original")
    patch(model).save_pretrained(tmp_path / "patched")
    files = sorted(path.name for path in (tmp_path / "original").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for file in files:
        assert (tmp_path / "original" / file).read_bytes() == (tmp_path / "patched" / file).read_bytes()
    assert "prefixkit" not in json.dumps(json.loads((tmp_path / "patched" / "config.json").read_text()))


# With any other cache, the patched model is the original, bit for bit.


def static_cache(model):
    return StaticCache(config=model.config, max_cache_len=32)


CACHES = {
    "none": lambda model: None,
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": static_cache,
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("model_type", "attn_implementation"),
    [(model_type, "eager") for model_type in CORE]
    # SDPA has no soft cap, and newer transformers refuse it for Gemma-2.
    + [(model_type, "sdpa") for model_type in CORE if model_type != "gemma2"],
)
def test_with_another_cache_forward_is_the_original_bit_for_bit(model_type, cache, attn_implementation, tiny):
    model = tiny(model_type)
    model.set_attn_implementation(attn_implementation)
    ids = torch.randint(3, 128, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # left padding

    def run():
        past = CACHES[cache](model)
        out = model(ids, attention_mask=mask, past_key_values=past, use_cache=past is not None)
        if past is None:
            return [out.logits]
        more = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        return [out.logits, model(ids[:, :1], attention_mask=more, past_key_values=past).logits]

    with torch.no_grad():
        expected = run()
        patch(model)
        assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"do_sample": False, "cache_implementation": "static"},
    ],
    ids=["greedy", "sample", "beams", "static cache"],
)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_generate_is_the_original_token_for_token(model_type, how, tiny):
    model = tiny(model_type)
    ids = torch.randint(3, 128, (2, 9))

    def run():
        torch.manual_seed(0)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            return_dict_in_generate=True,
            output_logits=True,
            **how,
        )
        return [out.sequences, *out.logits]

    expected = run()
    patch(model, tree_cache="never")
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


def test_attentions_are_still_recorded(tiny):
    model = tiny()
    ids = torch.randint(3, 128, (1, 6))
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
        fresh = patch(copy.deepcopy(model))(ids, output_attentions=True).attentions
    assert len(fresh) == len(expected) == 2
    assert all(torch.equal(a, b) for a, b in zip(fresh, expected, strict=True))


# Whatever is hooked into or wrapped around the model stays in place.


class Counting(ModelHook):
    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def check_tree(model, drive, dense_logits, rng):
    """The tree's logits against the model's own, with patch and hooks as they are."""
    tokens = rng.integers(3, 128, 10).tolist()
    run = drive(model)
    run.tree.insert(tokens)
    run.run()
    assert torch.allclose(run.logits_of(tokens), dense_logits(model, tokens), atol=1e-4)


@pytest.mark.parametrize("hook_first", [True, False], ids=["hook then patch", "patch then hook"])
def test_accelerate_hooks_stay_and_the_patch_is_reached(hook_first, tiny, drive, dense_logits, rng):
    model = tiny()
    if not hook_first:
        patch(model)
    hooks = [Counting() for _ in attentions(model)]
    for module, hook in zip(attentions(model), hooks, strict=True):
        add_hook_to_module(module, hook)
    before = everything(model)
    patch(model)
    check_tree(model, drive, dense_logits, rng)
    assert [hook.calls for hook in hooks] == [1, 1], "the dense run; the tree ran in a copy"
    if hook_first:
        unpatch(model)
        assert everything(model) == before


def test_unpatch_and_hook_removal_commute(tiny):
    plain, model = tiny(seed=3), tiny(seed=3)
    for module in attentions(model):
        add_hook_to_module(module, Counting())
    patch(model)
    for module in attentions(model):
        remove_hook_from_module(module)
    assert is_patched(model)
    unpatch(model)
    ids = torch.randint(3, 128, (1, 6))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    for module in attentions(model):
        assert vars(module).get("forward", module.forward).__func__ is type(module).forward


def test_removed_hooks_leave_a_bound_forward_that_is_patched_too(tiny, drive, dense_logits, rng):
    model = tiny()
    for module in attentions(model):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
        remove_hook_from_module(module)
    assert "forward" in vars(attentions(model)[0])
    check_tree(model, drive, dense_logits, rng)


def test_a_dispatched_model_runs_over_a_tree(tiny, drive, dense_logits, rng):
    model = tiny()
    check_tree(dispatch_model(model, {"": "cpu"}, force_hooks=True), drive, dense_logits, rng)


def test_an_offloaded_model_runs_over_a_tree(tiny, drive, dense_logits, rng):
    model = tiny()
    spec = kv_spec(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    assert kv_spec(model) == spec
    check_tree(model, drive, dense_logits, rng)


class LoraLinear(nn.Module):
    """A low-rank adapter around a projection, as adapter libraries put it there."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, 4, bias=False)
        self.lora_b = nn.Linear(4, base.out_features, bias=False)
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x):
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


@pytest.mark.parametrize("adapter_first", [True, False], ids=["adapter then patch", "patch then adapter"])
def test_adapters_on_projections_stay_in_effect(adapter_first, tiny, drive, dense_logits, rng):
    model = tiny()
    if not adapter_first:
        patch(model)
    for module in attentions(model):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(module, name, LoraLinear(getattr(module, name)))
    check_tree(model, drive, dense_logits, rng)
