"""Counts, sizes and types come from the modules and tensors at hand."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import prefixkit
from prefixkit.models import UnsupportedModel, facts_of, kv_spec, patch
from prefixkit.models.weights.state import state_of
from prefixkit.testing.kv_specs import spec_of_alike
from prefixkit.testing.tiny import ByteTokenizer, tiny_llama

CPU = torch.device("cpu")


@pytest.mark.parametrize("model_type", ["llama", "phi3"], ids=["separate projections", "one fused projection"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (4, 4), (6, 3)])
def test_heads_are_counted(model_type, heads, kv_heads, tiny):
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 24 * heads}
    model = tiny(model_type, num_hidden_layers=3, **shape)
    if model_type == "phi3":
        assert not hasattr(model.model.layers[0].self_attn, "k_proj")
    assert kv_spec(model) == spec_of_alike(3, kv_heads, 24, torch.float32, CPU)
    assert [kind.heads for kind in facts_of(model).layers] == [heads] * 3
    assert kv_spec(patch(model)) == spec_of_alike(3, kv_heads, 24, torch.float32, CPU)


def test_a_shard_has_its_own_share_of_heads(tiny):
    model = tiny()
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(layer.self_attn, name)
            projection.weight = nn.Parameter(projection.weight[: projection.out_features // 2])
        out = layer.self_attn.o_proj
        out.weight = nn.Parameter(out.weight[:, : out.in_features // 2])  # the shards' products are summed up
    assert {(kind.heads, kind.kv_heads) for kind in facts_of(model).layers} == {(2, 1)}


def test_a_quantised_projection_is_counted_by_what_it_declares(tiny):
    class Packed(nn.Module):
        """Computes from a copy that is no parameter."""

        def __init__(self, linear):
            super().__init__()
            self.out_features, self.dense = linear.out_features, [linear.weight]
            self.weight = nn.Parameter(
                torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False
            )

        def forward(self, x):
            return nn.functional.linear(x, self.dense[0])

    model = tiny().bfloat16()
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Packed(getattr(layer.self_attn, name)))
    assert kv_spec(model) == spec_of_alike(2, 2, 24, torch.bfloat16, CPU)


class Held(nn.Module):
    """A linear layer whose weight is a buffer, as GPTQ's, AWQ's and BitLinear's are."""

    def __init__(self, linear):
        super().__init__()
        self.out_features = linear.out_features
        self.register_buffer("held", linear.weight.detach().clone())

    def forward(self, x):
        return nn.functional.linear(x, self.held)


def test_weights_may_be_buffers(tiny):
    model = tiny()
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Held(getattr(layer.self_attn, name)))
    assert kv_spec(model) == spec_of_alike(2, 2, 24, torch.float32, CPU)


def test_under_autocast_keys_have_another_dtype(tiny):
    model = tiny()
    with torch.autocast("cpu", torch.bfloat16):
        assert kv_spec(model).dtype == torch.bfloat16
    assert kv_spec(model).dtype == torch.float32


def test_a_dtype_that_no_pool_holds_is_named(tiny):
    with pytest.raises(UnsupportedModel, match=r"the keys of LlamaForCausalLM are torch.float64, .*model.float\(\)"):
        kv_spec(tiny().double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_is_that_of_the_projections(dtype, tiny):
    assert kv_spec(tiny().to(dtype)).dtype == dtype


def test_layers_that_differ_are_refused(tiny):
    model = tiny()
    layer = model.model.layers[1].self_attn
    layer.to(torch.bfloat16)

    def rounded(_, args, kwargs):
        inputs = {name: kwargs[name] for name in ("hidden_states", "position_embeddings")}
        return args, kwargs | tree_map(lambda tensor: tensor.bfloat16(), inputs)

    layer.register_forward_pre_hook(rounded, with_kwargs=True)
    layer.register_forward_hook(lambda _, args, output: (output[0].float(), *output[1:]))
    with pytest.raises(UnsupportedModel, match=r"cache torch.float32, torch.bfloat16, and a pool holds one dtype"):
        kv_spec(model)


def test_what_was_measured_stands_until_what_it_depends_on_changes(tiny):
    model = tiny()
    known, attention = facts_of(model).probed, model.model.layers[1].self_attn
    assert facts_of(model).probed is known
    attention.scaling *= 2
    assert facts_of(model).probed is not known
    attention.scaling /= 2
    assert facts_of(model.bfloat16()).layers[0].dtype == torch.bfloat16
    assert facts_of(model.float()).probed is known
    q_proj = attention.q_proj
    attention.q_proj = Held(q_proj)
    assert facts_of(model).probed is not known
    attention.q_proj = q_proj
    assert facts_of(model).probed is known
    attention.forward = lambda *args, **kwargs: None
    with pytest.raises(UnsupportedModel, match="has a forward of its own"):
        facts_of(model).probed  # noqa: B018
    del attention.forward
    assert facts_of(model).probed is known


def test_unsupported_models_have_no_spec():
    with pytest.raises(UnsupportedModel, match="got Linear"):
        kv_spec(nn.Linear(2, 2))


@contextmanager
def traversals(model):
    """Counts passes over a model's modules: those that prefixkit begins, and those by which it looks a model up."""
    count, frames, codes = [0], set(), {nn.Module.named_modules.__code__, state_of.__code__}

    def look(frame, event, argument):
        if event == "call" and frame.f_code in codes and frame not in frames:
            frames.add(frame)  # a generator is called for each module that it gives
            of, caller = frame.f_locals.get("self", frame.f_locals.get("model")), frame.f_back
            while caller is not None and Path(caller.f_code.co_filename).name == "module.py":
                caller = caller.f_back  # modules() and parameters() are torch's
            ours = caller is not None and "prefixkit" in Path(caller.f_code.co_filename).parts
            count[0] += ours and (of is model or of is model.model)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield count
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("call", ["generate", "beam_search", "score", "session", "scores of a session", "model"])
def test_a_second_call_looks_at_the_modules_at_most_twice(call):
    model, tokenizer = patch(tiny_llama()), ByteTokenizer()
    rows = torch.tensor([[*b"a shared beginning of forty tokens or so", n] for n in b"abcd"])
    session = prefixkit.Session(model, tokenizer, kv_budget="1MiB")
    calls = {
        "generate": lambda: prefixkit.generate(model, tokenizer, ["a prompt"], n=3, max_new_tokens=3),
        "beam_search": lambda: prefixkit.beam_search(model, tokenizer, ["a prompt"], num_beams=3, max_new_tokens=3),
        "score": lambda: prefixkit.score(model, tokenizer, "a prompt", ["one", "two"]),
        "session": lambda: session.generate(["a prompt"], n=3, max_new_tokens=3),
        "scores of a session": lambda: session.score("a prompt", ["one", "two"]),
        "model": lambda: model.generate(rows, max_new_tokens=3, do_sample=False),
    }
    calls[call]()
    with traversals(model) as count:
        calls[call]()
    assert 1 <= count[0] <= 2
