"""``generate()`` of models that others have wrapped, compiled or given adapters."""

from __future__ import annotations

import copy

import pytest
import torch

from prefixkit import TreeCache, patch, unpatch
from tests.models.generate.generating import BEAMS, NEW, SAMPLED, compared, generate
from tests.models.tiny_families import VOCAB, make_model


@pytest.mark.parametrize("patched_first", [True, False])
def test_mixed_precision_of_accelerate(patched_first, padded):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def prepared(model):
        AcceleratorState._reset_state()
        return Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model, evaluation_mode=True)

    model = make_model()
    theirs, said = prepared(copy.deepcopy(model)), {"output_logits": True, "return_dict_in_generate": True}
    exact, want = (generate(each, padded, do_sample=False, **said).logits[0] for each in (model, theirs))
    model = prepared(patch(model)) if patched_first else patch(prepared(model))
    got = generate(model, padded, **SAMPLED, **said)
    assert isinstance(got.past_key_values, TreeCache)
    assert got.past_key_values.layers[0].keys.dtype == torch.bfloat16
    assert (got.logits[0][::4] - exact).abs().mean() <= 1.5 * (want - exact).abs().mean()
    AcceleratorState._reset_state()


def test_autocast(padded):
    model = patch(make_model())
    with torch.autocast("cpu", torch.bfloat16):
        out = generate(model, padded, **SAMPLED, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, TreeCache)
    assert out.past_key_values.layers[0].keys.dtype == torch.bfloat16


def test_a_forward_that_was_replaced_after_the_patch(padded, said):
    model = patch(make_model())
    want = generate(model, padded, **SAMPLED)
    inner = type(model).__mro__[1].forward
    model.forward = lambda *args, **kwargs: inner(model, *args, **kwargs)
    assert torch.equal(generate(model, padded, **SAMPLED), want)
    assert "forward was replaced after the patch" in said()[0]


def test_a_forward_that_was_replaced_before_the_patch_comes_back(padded):
    model = make_model()
    calls, inner = [], model.forward
    model.forward = lambda *args, **kwargs: (calls.append(1), inner(*args, **kwargs))[1]
    before = model.forward
    out = generate(patch(model), padded, **SAMPLED, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, TreeCache)
    assert calls
    unpatch(model)
    assert model.__dict__["forward"] is before


def test_a_class_made_of_the_patched_one(padded):
    """As FSDP makes one."""
    model = patch(make_model())
    model.__class__ = type("FSDP" + type(model).__name__, (type(model),), {})
    out = generate(model, padded, **SAMPLED, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, TreeCache)


def test_adapters(padded):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_model(), config).eval()
    want, got, cache = compared(model, padded, **SAMPLED)
    assert torch.equal(got, want)
    assert isinstance(cache, TreeCache)
    with model.disable_adapter():
        plain = generate(model, padded, **SAMPLED)
    assert not torch.equal(plain, got)


def test_prefix_tuning_goes_on_with_its_own_cache(padded):
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(make_model(), config).eval()
    want, got, _ = compared(model, padded, do_sample=False)
    assert torch.equal(got, want)


def test_a_forward_that_was_compiled_after_the_patch(padded, dynamo):
    want, model = generate(make_model(seed=2), padded, **SAMPLED), patch(make_model(seed=2))
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(generate(model, padded, **SAMPLED), want)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("how", "when"), [("in place", "before"), ("wrapped", "after")])
def test_layers_that_were_compiled_one_by_one(how, when, rng, dynamo):
    """Graphs serve any length, step and layer: no call makes one for what a cache holds."""
    plain, graphs, made = make_model(num_hidden_layers=5), [], []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = copy.deepcopy(plain) if when == "before" else patch(copy.deepcopy(plain), tree_cache="always")
    for index, layer in enumerate(model.model.layers):
        if how == "in place":
            layer.compile(backend=count)
        else:
            model.model.layers[index] = torch.compile(layer, backend=count)
    patch(model, tree_cache="always")
    for length in (7, 20, 33):
        inputs = {"input_ids": torch.from_numpy(rng.integers(3, VOCAB, (1, length)))}
        for options in (SAMPLED, BEAMS):
            options = {**options, "eos_token_id": None, "max_new_tokens": 5}
            got = generate(model, inputs, **options, return_dict_in_generate=True)
            assert not got.past_key_values.fell_back
            assert torch.equal(got.sequences, generate(plain, inputs, **options))
        made.append(len(graphs))
    assert 0 < made[0] <= 8
    assert set(made) == set(made[:1])


def test_hooks_of_the_model_run_once_a_call(padded):
    model, seen = patch(make_model()), []
    model.register_forward_hook(lambda module, args, out: seen.append(out.logits.shape[0]))
    generate(model, padded, **SAMPLED, eos_token_id=None)
    assert seen == [12] * NEW
