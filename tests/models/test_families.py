"""Every family in the table answers over a tree what the original model answers over each text alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prefixkit.attention.visible import Visible
from prefixkit.models import UnsupportedModel, is_patched, patch
from prefixkit.models.attention_class import original_class
from prefixkit.models.families import attention_layers
from prefixkit.models.variants.layer_scores import register_variant
from prefixkit.testing.integrity import check_tree
from tests.models.driver import decided_by_rounding
from tests.models.tiny_families import PECULIAR

LOGIT_TOLERANCE = 1e-4
WINDOW = 7


def prompts_with_a_shared_head(rng):
    head = rng.integers(3, 128, 20).tolist()
    tails = [rng.integers(3, 128, n).tolist() for n in (6, 3, 9, 9)]
    return [head + tails[0], head + tails[1], head[:11] + tails[2], tails[3]]


class Variants(TorchDispatchMode):
    """Keys of the variants that attention is asked for."""

    def __init__(self):
        super().__init__()
        self.keys = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prefixkit.tree_attention.default:
            self.keys.add(args[6])
        return function(*args, **(kwargs or {}))


# What the layers of families differ in is the same for a prompt as a whole: a few stand for all.
@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("model_type", "budget"),
    [*((name, 13) for name in PECULIAR), *((name, 10**6) for name in ("llama", "gemma2", "gpt_oss", "qwen3_moe"))],
)
def test_a_tree_gives_the_logits_of_the_original_model(model_type, budget, tiny, drive, dense_logits, rng):
    model = tiny(model_type)
    run = drive(model)
    sequences = [run.tree.insert(prompt) for prompt in prompts_with_a_shared_head(rng)]
    run.run(budget)
    sequences += run.tree.fork(sequences[0], 2)
    for _ in range(3):
        run.tree.extend_each(sequences, rng.integers(3, 128, len(sequences)).tolist())
        with Variants() as seen:
            run.run()
    check_tree(run.tree)
    for sequence in sequences:
        tokens = sequence.tokens().tolist()
        errors = (run.logits_of(tokens) - dense_logits(model, tokens)).abs().amax(-1)
        if errors.max() > LOGIT_TOLERANCE:
            errors = errors[~decided_by_rounding(model, tokens)]
            assert len(errors), "some token is sure"
        assert errors.max() <= LOGIT_TOLERANCE, f"sequence {sequence.id}"
    assert run.tokens_run == run.tree.snapshot().num_tokens, "a shared token runs once"
    expected = {WINDOW} if getattr(model.config, "sliding_window", None) else {None}
    if "full_attention" in (getattr(model.config, "layer_types", None) or ()):
        expected.add(None)
    cap, sinks = getattr(model.config, "attn_logit_softcapping", None), model_type == "gpt_oss"
    asked = {register_variant(Visible(window), cap, sinks) for window in expected}
    assert seen.keys == asked, "the layers attend with the windows and the cap of the config"


@pytest.mark.drawn(6)
@pytest.mark.parametrize("model_type", PECULIAR)
def test_every_family_notices_positions_and_masks_that_are_not_the_trees(model_type, tiny, drive, rng):
    run = drive(tiny(model_type))
    run.tree.insert(rng.integers(3, 128, 9))
    cache = run.runner.cache
    for wrong, message in [
        ({"position_ids": torch.arange(1, 10)[None]}, "position_ids other than the step's"),
        ({"attention_mask": None}, "instead of the empty one"),
        ({"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])}, "instead of the empty one"),
    ]:
        cache.begin(run.step())
        with pytest.raises(ValueError, match=message):
            run.model(**{**cache.inputs(), **wrong})
        cache.abandon()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_as_close_to_float32_as_the_original_model(dtype, tiny, drive, dense_logits, rng):
    exact = tiny("llama")
    tokens = rng.integers(3, 128, 40).tolist()
    reference = dense_logits(exact, tokens)
    model = tiny("llama").to(dtype)
    model.load_state_dict(exact.state_dict())
    run = drive(model)
    run.tree.insert(tokens)
    run.run()
    own_error = (dense_logits(model, tokens) - reference).abs().mean()
    assert (run.logits_of(tokens) - reference).abs().mean() <= 1.5 * own_error


# Code of its own.
UNSUPPORTED = {
    "openai-gpt": (
        {"n_layer": 1, "n_embd": 32, "n_head": 2},
        "no layer both fills a KV cache.*; it has Attention",
    ),
}


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_other_models_are_refused_with_what_is_in_the_way(model_type):
    shape, why = UNSUPPORTED[model_type]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{"vocab_size": 64, **shape}))
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModel, match=rf"{type(model).__name__} \(model_type '{model_type}'\): {why}"):
        patch(model)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_an_encoder_decoder_is_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModel, match=r"T5ForConditionalGeneration \(model_type 't5'\) is an encoder-decoder"):
        patch(model)


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), nn.Sequential(), "gpt2", None, 3], ids=repr)
def test_what_is_no_transformers_model_is_refused_as_such(thing):
    with pytest.raises(
        UnsupportedModel, match=f"expected a transformers causal language model, got {type(thing).__name__}"
    ):
        patch(thing)


def test_a_wrapped_model_is_found(tiny):
    wrapper = nn.ModuleDict({"policy": tiny("llama")})
    assert is_patched(patch(wrapper)["policy"])


def test_a_bidirectional_layer_is_refused_before_anything_changes(tiny):
    model = tiny("gemma3_text")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UnsupportedModel, match=r"model.layers.1.self_attn \(Gemma3Attention\) is bidirectional"):
        patch(model)
    assert not is_patched(model)


def test_a_forward_of_ones_own_is_refused_unless_it_follows_the_interface_itself(tiny):
    model = tiny("llama")
    original = type(model.model.layers[1].self_attn)

    class Around(original):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Rewritten(original):
        forward = original.forward

    for cls, accepted in ((Rewritten, True), (Around, False)):
        model.model.layers[1].self_attn.__class__ = cls
        if accepted:
            assert len(attention_layers(model)) == 2
        else:
            with pytest.raises(UnsupportedModel, match=r"of 2 layers, \[1\] keep no KV"):
                patch(model)
    assert not is_patched(model)


def test_two_modules_for_one_layer_are_refused(tiny):
    model = tiny("llama")
    model.model.layers[0].self_attn.layer_idx = 1
    with pytest.raises(
        UnsupportedModel, match=r"layers.0.self_attn and model.layers.1.self_attn both keep the KV of layer 1"
    ):
        patch(model)
    assert not is_patched(model)


def test_a_subclass_that_keeps_the_forward_is_accepted(tiny):
    model = tiny("llama")
    cls = type(model.model.layers[0].self_attn)
    model.model.layers[0].self_attn.__class__ = type("ShardedLlamaAttention", (cls,), {})
    assert [original_class(layer).__name__ for layer in attention_layers(patch(model)).values()] == [
        "ShardedLlamaAttention",
        "LlamaAttention",
    ]


@pytest.mark.parametrize(
    "wrap", [lambda f: partial(f), lambda f: lambda *a, **k: f(*a, **k)], ids=["partial", "closure"]
)
def test_a_forward_hidden_behind_a_wrapper_is_refused(wrap, tiny):
    model = tiny("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = wrap(attention.forward)
    with pytest.raises(UnsupportedModel, match=r"model.layers.1.self_attn.*has a forward of its own"):
        patch(model)
    assert not is_patched(model)


def test_layers_come_in_the_order_of_their_index(tiny):
    model = tiny("llama", num_hidden_layers=3)
    layers = attention_layers(model)
    assert [layer.layer_idx for layer in layers.values()] == [0, 1, 2]
    assert list(layers) == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert isinstance(model, PreTrainedModel)
