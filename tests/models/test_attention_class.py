"""What an attention class asks for is done over the tree, or refused; never ignored."""

from __future__ import annotations

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from prefixkit.models import IncompleteStep, NotPatched, patch, unpatch
from prefixkit.models.attention_class import original_class, tree_class
from tests.models.forwards import class_level_forward


@pytest.fixture
def run(tiny, drive, rng):
    """A patched model in the middle of a step: ``run.cache.inputs()`` goes to ``run.model``."""
    driver = drive(tiny())
    driver.tree.insert(rng.integers(3, 128, 9))
    driver.cache = driver.runner.cache
    driver.cache.begin(driver.step())
    return driver


def test_the_documented_call_works(run):
    with torch.no_grad():
        logits = run.model(**run.cache.inputs()).logits
    run.cache.end()
    assert logits.shape == (1, 9, 128)


@pytest.mark.parametrize(
    "mask",
    [
        None,
        torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]]),
        torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0]]),
        torch.tensor([[1] * 9 + [0, 0]]),
        torch.ones(1, 1, 9, 9, dtype=torch.bool),
    ],
    ids=["none", "left padding", "right padding", "padding beyond the tokens", "4-D"],
)
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_a_mask_is_refused_rather_than_ignored(run, mask, attn_implementation):
    run.model.set_attn_implementation(attn_implementation)
    with pytest.raises(ValueError, match=r"instead of the empty one of cache.inputs\(\)"):
        run.model(**{**run.cache.inputs(), "attention_mask": mask})


@pytest.mark.parametrize("positions", [None, torch.arange(1, 10)[None]], ids=["left to the model", "others"])
def test_positions_other_than_the_steps_are_refused(tiny, drive, rng, positions):
    driver = drive(tiny())
    driver.tree.insert(rng.integers(3, 128, 12))
    driver.run(budget=9)
    driver.tree.insert(rng.integers(3, 128, 6))
    driver.tree.insert(rng.integers(3, 128, 3))  # positions 0..5, 0..2
    cache = driver.runner.cache
    cache.begin(driver.step())
    with pytest.raises(ValueError, match="position_ids other than the step's"):
        driver.model(**{**cache.inputs(), "position_ids": None if positions is None else positions})


def test_positions_equal_to_the_steps_are_accepted_as_any_tensor(run):
    with torch.no_grad():
        own = run.model(**run.cache.inputs()).logits
        run.cache.abandon()
        run.cache.begin(run.step())
        given = run.model(**{**run.cache.inputs(), "position_ids": torch.arange(9)[None]}).logits
    run.cache.end()
    assert torch.equal(given, own)


def test_dropout_is_refused(run):
    run.model.train()
    for layer in run.model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"LlamaAttention asked for attention dropout 0.1.*model.eval\(\)"):
        run.model(**run.cache.inputs())


@pytest.mark.parametrize(
    "asked",
    [{"alibi": torch.zeros(1)}, {"head_mask": torch.ones(4)}, {"cu_seq_lens_q": torch.tensor([0, 9])}],
    ids=str,
)
def test_unknown_keywords_are_refused(run, asked):
    with pytest.raises(ValueError, match=f"LlamaAttention passed {next(iter(asked))} .*would ignore it"):
        run.model(**run.cache.inputs(), **asked)


def test_a_bias_that_the_model_did_not_have_when_it_was_measured_is_refused(run):
    with pytest.raises(IncompleteStep, match=r"layer 0 adds \[1\] to its scores, which is not what it did"):
        run.model(**run.cache.inputs(), position_bias=torch.zeros(1))


def test_sinks_of_another_shape_are_refused(run):
    with pytest.raises(ValueError, match=r"LlamaAttention passed sinks of shape \[4\]"):
        run.model(**run.cache.inputs(), sinks=torch.zeros(4))


def test_bidirectional_attention_is_refused(run):
    with pytest.raises(ValueError, match=r"passed is_causal \(bool\)"):
        run.model(**run.cache.inputs(), is_causal=False)


def test_a_missing_scaling_is_not_guessed(run):
    run.model.model.layers[0].self_attn.scaling = None
    with pytest.raises(ValueError, match="LlamaAttention passed no scaling"):
        run.model(**run.cache.inputs())


def test_the_scaling_is_the_modules_own(tiny, drive, dense_logits, rng):
    model = tiny()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.77
    driver = drive(model)
    tokens = rng.integers(3, 128, 9).tolist()
    driver.tree.insert(tokens)
    driver.run()
    assert torch.allclose(driver.logits_of(tokens), dense_logits(model, tokens), atol=1e-4)


def test_an_exception_in_a_layer_leaves_the_module_as_it_was(run):
    attention = run.model.model.layers[1].self_attn
    before = dict(vars(attention))

    def explode(*args):
        raise RuntimeError("projection")

    attention.o_proj.register_forward_hook(explode)
    with pytest.raises(RuntimeError, match="projection"):
        run.model(**run.cache.inputs())
    assert vars(attention) == before
    assert attention.config is run.model.config
    assert attention.config._attn_implementation == "eager"


def test_an_unpatched_model_refuses_the_cache(run, tiny):
    with pytest.raises(NotPatched, match=r"layer 0 .* is not patched; call prefixkit.patch\(model\)"):
        tiny()(**run.cache.inputs())


def test_one_unpatched_layer_is_enough(run, tiny):
    run.model.model.layers[1] = tiny().model.layers[1]
    with pytest.raises(NotPatched, match="layer 1"):
        run.model(**run.cache.inputs())


def test_the_attention_function_cannot_be_chosen_globally(tiny):
    config = tiny().config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="prefixkit")
    with pytest.raises(ValueError, match="attn_implementation='prefixkit' cannot be set"):
        model(torch.tensor([[3, 4, 5]]))
    with pytest.raises(ValueError, match="attn_implementation='prefixkit' cannot be set"):
        model(torch.tensor([[3, 4, 5]]), attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool))


def test_one_class_is_made_for_each_original(tiny):
    model, other = patch(tiny()), patch(tiny())
    a, b = model.model.layers[0].self_attn, other.model.layers[1].self_attn
    assert type(a) is type(b) is tree_class(original_class(a))


@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "accelerate hooks"])
def test_a_forward_given_to_the_class_after_the_patch_is_the_one_that_runs(hooks, tiny, drive, dense_logits, rng):
    """Over a tree and with any other cache, and no longer than the class has it."""
    model, tokens = tiny(), rng.integers(3, 128, 9).tolist()
    plain = dense_logits(model, tokens)
    patched = drive(model).model
    if hooks:
        for layer in patched.model.layers:
            add_hook_to_module(layer.self_attn, ModelHook())
    with class_level_forward(LlamaAttention, 3.0):
        expected = dense_logits(model, tokens)
        assert not torch.allclose(expected, plain, atol=1e-2)
        assert torch.equal(dense_logits(patched, tokens), expected)
        run = drive(patched)
        run.tree.insert(tokens)
        run.run()
        assert torch.allclose(run.logits_of(tokens), expected, atol=1e-4)
    assert torch.equal(dense_logits(patched, tokens), plain)
    assert torch.equal(dense_logits(unpatch(patched), tokens), plain)
