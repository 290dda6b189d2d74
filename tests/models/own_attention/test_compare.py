"""A class that computes something else than its replacement is refused, whatever has changed in it."""

from __future__ import annotations

import copy
import importlib
import pickle
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, DynamicCache

from prefixkit import patch, unpatch
from prefixkit.models import UnsupportedModel, kv_spec
from tests.models.forwards import class_level_forward
from tests.models.generate.generating import generate
from tests.models.own_attention.own_models import CASES, own_model

FACTOR = 1.02  # about what bfloat16 could hide; float32 cannot


def attention_of(model):
    """The class of the attention modules of a model, which has code of its own."""
    names = ("Attention", "SelfAttention")
    found = [module for module in model.modules() if type(module).__name__.endswith(names)]
    return type(next(module for module in found if hasattr(module, "layer_idx") or hasattr(module, "attn_dropout")))


@contextmanager
def replaced(owner, name, value):
    """In this block an attribute of a class or a file has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@pytest.mark.parametrize("case", ["bloom", "falcon", "falcon, ALiBi", "mpt", "xglm", "rembert", "roformer"])
def test_another_forward_is_refused(case):
    model = own_model(case)
    with class_level_forward(attention_of(model), FACTOR), pytest.raises(UnsupportedModel, match="code of its own"):
        kv_spec(model)
    assert len(kv_spec(model).layers) == 2


@pytest.mark.parametrize("case", ["gptj", "codegen", "gpt_neo", "gpt_neox_japanese"])
def test_another_core_is_refused(case):
    model = own_model(case)
    cls = attention_of(model)
    if not hasattr(cls, "_attn"):
        pytest.skip("since transformers 5.24 the class follows the interface")
    before = cls._attn

    def scaled(self, query, *args, **kwargs):
        return before(self, query * 1.5, *args, **kwargs)

    with replaced(cls, "_attn", scaled), pytest.raises(UnsupportedModel, match="code of its own"):
        kv_spec(model)


def test_other_weights_of_jetmoe_and_diffllama_are_refused():
    """These follow the interface, whose eager function is the class's own."""
    for case in ("jetmoe", "diffllama"):
        model = own_model(case)
        file = importlib.import_module(type(model).__module__)
        before = file.eager_attention_forward

        def eager(module, query, *args, before=before, **kwargs):
            return before(module, query * 1.5, *args, **kwargs)

        with replaced(file, "eager_attention_forward", eager), pytest.raises(UnsupportedModel, match="of its own"):
            kv_spec(model)


def test_a_window_that_the_config_does_not_tell_is_noticed():
    """Of a length that shows only in a text that is longer than the first that is compared."""
    model = own_model("gpt_neo", window_size=40)
    model.config.window_size = 42
    with pytest.raises(UnsupportedModel, match="code of its own"):
        kv_spec(model)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_in_half_precision_is_no_difference(dtype):
    for case in CASES:
        assert kv_spec(own_model(case).to(dtype)).dtype == dtype


def test_a_forward_that_the_class_is_given_after_the_patch_runs_without_a_tree(rng):
    model = patch(own_model("bloom"), tree_cache="always")
    inputs = {"input_ids": torch.from_numpy(rng.integers(3, 128, (1, 9)))}
    options = {"return_dict_in_generate": True, "do_sample": False}
    assert not generate(model, inputs, **options).past_key_values.fell_back
    with class_level_forward(attention_of(unpatch(model)), 3.0):
        want = generate(model, inputs, do_sample=False)
        got = generate(patch(model, tree_cache="always"), inputs, **options)
        assert type(got.past_key_values) is DynamicCache
        assert torch.equal(got.sequences, want)
    assert not generate(model, inputs, **options).past_key_values.fell_back


def test_a_class_made_from_one_of_these_is_not_taken_for_it():
    model = own_model("jetmoe")
    for layer in model.model.layers:
        layer.self_attention.__class__ = type("Mine", (type(layer.self_attention),), {})
    with pytest.raises(UnsupportedModel, match="attends over other keys and values"):
        kv_spec(model)


@pytest.mark.parametrize("case", ["bloom", "falcon, ALiBi", "mpt"])
def test_shapes_without_values_are_enough_for_a_spec(case):
    """Slopes are not asked for, which would have no values either."""
    config = own_model(case).config
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config)
    assert kv_spec(model) == kv_spec(own_model(case))


def test_an_argument_that_a_replacement_does_not_know_is_refused():
    model = own_model("mpt")
    cls = attention_of(model)
    before = cls.forward

    def forward(self, hidden_states, bias=None, layer_past=None, **kwargs):
        return before(self, hidden_states, bias, layer_past, **kwargs)

    def block(self, hidden_states, position_bias, attention_mask, layer_past=None, **kwargs):
        out = self.attn(
            self.norm_1(hidden_states), bias=position_bias, layer_past=layer_past, attention_mask=attention_mask
        )
        return out[0] + hidden_states, out[1]

    blocks, fails = type(model.transformer.blocks[0]), pytest.raises(UnsupportedModel, match="place fails: TypeError")
    with replaced(cls, "forward", forward), replaced(blocks, "forward", block), fails:
        kv_spec(model)


@pytest.mark.parametrize("case", ["bloom", "falcon, ALiBi", "gpt_neo", "mpt"])
def test_a_patched_model_can_be_copied_and_unpatched(case):
    model = own_model(case)
    before = [type(module) for module in model.modules()]
    for duplicate in (copy.deepcopy(patch(model)), pickle.loads(pickle.dumps(model))):
        assert kv_spec(duplicate) == kv_spec(model)
    assert [type(module) for module in unpatch(model).modules()] == before
