"""However weights are changed between two calls, the second samples as a model would that never had others."""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters
from transformers import MistralConfig, MistralForCausalLM

import prefixkit
from prefixkit import Session
from prefixkit.testing.tiny import tiny_llama

PROMPT = [3 + 5 * index % 251 for index in range(48)]
OPTIONS: dict[str, Any] = {"n": 1, "max_new_tokens": 2, "temperature": 0.0, "stop_token_ids": ()}


def large() -> Any:
    """Too large to be compared whole at each call."""
    return tiny_llama(vocab_size=8192)


def bfloat16() -> Any:
    return large().to(torch.bfloat16)


def with_lora() -> Any:
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(), config, adapter_name="one")
    model.add_adapter("two", config)
    return model.eval()


def flat() -> Any:
    """All parameters are views of one buffer, as trainers of shards keep them."""
    model = large()
    model.flat = parameters_to_vector(model.parameters()).detach().clone()
    begin = 0
    for parameter in model.parameters():
        parameter.data = model.flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    return model


def with_plain_tensor() -> Any:
    """One that scales its embeddings by a tensor that it never registered."""
    model = tiny_llama()
    model.model.embed_tokens.scale = torch.ones(())
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out * module.scale)
    return model


def with_window() -> Any:
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "sliding_window": 24}
    return MistralForCausalLM(MistralConfig(**heads, **sizes, eos_token_id=None)).eval()


def with_own_class() -> Any:
    """One with a class of its own, whose methods are no other model's."""
    model = tiny_llama()
    mlp = model.model.layers[0].mlp

    class Own(type(mlp)):  # type: ignore[misc]
        pass

    mlp.__class__ = Own
    return model


def attention(model: Any, layer: int = 0) -> Any:
    return next(m for name, m in model.named_modules() if name.endswith(f"layers.{layer}.self_attn"))


def k(model: Any) -> Any:
    return attention(model).k_proj.weight


def other(model: Any, scale: float = 1.0) -> list[torch.Tensor]:
    torch.manual_seed(9)
    return [(torch.randn(one.shape) * scale).to(one.dtype) for one in model.parameters()]


def each(model: Any, write: Callable[[Any, torch.Tensor], Any], scale: float = 1.0) -> None:
    for parameter, values in zip(model.parameters(), other(model, scale), strict=True):
        write(parameter, values)


def swap(one: Any, two: Any) -> None:
    one.data, two.data = two.data.clone(), one.data.clone()


def swap_values(one: Any, two: Any) -> None:
    kept = one.data.clone()
    one.data.copy_(two.data)
    two.data.copy_(kept)


def step(model: Any, kind: Any, **options: Any) -> None:
    optimizer = kind(model.parameters(), lr=0.3, **options)
    model(torch.tensor([PROMPT])).logits.square().mean().backward()
    optimizer.step()
    model.zero_grad()


def inference(write: Callable[[], Any]) -> None:
    with torch.inference_mode():
        write()


def without_grad(write: Callable[[], Any]) -> None:
    with torch.no_grad():
        write()


def by_pointer(tensor: torch.Tensor) -> None:
    values = (torch.randn(tensor.shape) * 3).to(tensor.dtype)
    ctypes.memmove(tensor.data_ptr(), values.data_ptr(), tensor.nbytes)


def average(model: Any) -> None:
    """An exponential moving average, of which bfloat16 keeps few changes."""
    each(model, lambda parameter, values: parameter.data.mul_(0.98).add_(values, alpha=0.02), 0.3)


def window(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 8
    model.config.sliding_window = 8


def replaced(model: Any) -> None:
    torch.manual_seed(3)
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 96, bias=False)


def scaled_class(model: Any) -> None:
    type(model.model.layers[0].mlp).forward = lambda mlp, x: x * 0.1


def vector(model: Any) -> torch.Tensor:
    return torch.cat([values.flatten() for values in other(model)])


def state() -> Any:
    return tiny_llama(1, vocab_size=8192).state_dict()


doubled = parametrize.register_parametrization


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    # -- writes that torch does not count
    "data.add_ to all": (large, lambda m: each(m, lambda p, v: p.data.add_(v))),
    "data.add_ to one row": (large, lambda m: k(m).data[3].add_(4.0)),
    "data write to one column": (large, lambda m: k(m).data[:, 3].mul_(-30)),
    "data write to one element": (large, lambda m: k(m).data[5, 7].fill_(90.0)),
    "data write to one embedding": (large, lambda m: m.get_input_embeddings().weight.data[PROMPT[-1]].neg_()),
    "data write to one element of a small model": (tiny_llama, lambda m: k(m).data[5, 7].fill_(90.0)),
    "data write to a bias-like vector": (large, lambda m: m.model.norm.weight.data[:32].neg_()),
    "data.mul_().add_()": (large, lambda m: each(m, lambda p, v: p.data.mul_(0.5).add_(v))),
    "moving average in bfloat16": (bfloat16, average),
    "flat buffer": (flat, lambda m: m.flat.mul_(torch.linspace(0.5, 2, len(m.flat)))),
    "numpy view": (large, lambda m: np.copyto(k(m).detach().numpy(), -k(m).detach().numpy())),
    "pointer": (large, lambda m: by_pointer(k(m))),
    "dlpack": (large, lambda m: torch.from_dlpack(k(m).detach()).mul_(-2)),
    "storage": (large, lambda m: k(m).untyped_storage().copy_((k(m).detach() * -2).untyped_storage())),
    "two tensors' values swapped": (large, lambda m: swap_values(k(m), attention(m).v_proj.weight)),
    "two layers' values swapped": (large, lambda m: swap_values(k(m), attention(m, 1).k_proj.weight)),
    "buffer through data": (large, lambda m: m.model.rotary_emb.inv_freq.data.mul_(0.3)),
    "LoRA through data": (with_lora, lambda m: attention(m).k_proj.lora_B["one"].weight.data.mul_(-30)),
    "tensor as a plain attribute": (with_plain_tensor, lambda m: m.model.embed_tokens.scale.data.fill_(-0.5)),
    "plain tensor replaced": (with_plain_tensor, lambda m: setattr(m.model.embed_tokens, "scale", torch.tensor(-2.0))),
    "vector_to_parameters": (large, lambda m: vector_to_parameters(vector(m), m.parameters())),
    # -- tensors exchanged
    "data assigned": (large, lambda m: each(m, lambda p, v: setattr(p, "data", v))),
    "data of two swapped": (large, lambda m: swap(k(m), attention(m).v_proj.weight)),
    "swap_tensors": (large, lambda m: torch.utils.swap_tensors(k(m), nn.Parameter(-k(m).detach()))),
    "parameter replaced": (large, lambda m: setattr(attention(m).k_proj, "weight", nn.Parameter(-k(m).detach()))),
    "load_state_dict": (large, lambda m: m.load_state_dict(state())),
    "load_state_dict(assign)": (large, lambda m: m.load_state_dict(state(), assign=True)),
    "module replaced": (tiny_llama, replaced),
    "layer dropped": (tiny_llama, lambda m: setattr(m.model.layers[1], "mlp", m.model.layers[0].mlp)),
    "embeddings resized": (tiny_llama, lambda m: (m.resize_token_embeddings(270), m.lm_head.weight.data[:4].mul_(9))),
    "to another dtype": (tiny_llama, lambda m: m.bfloat16()),
    # -- writes that torch counts
    "no_grad": (large, lambda m: without_grad(lambda: k(m).mul_(-2))),
    "inference_mode": (large, lambda m: inference(lambda: k(m).mul_(-2))),
    "AdamW, fused": (large, lambda m: step(m, torch.optim.AdamW, fused=True)),
    "SGD, foreach": (large, lambda m: step(m, torch.optim.SGD, foreach=True)),
    # -- what is no weight
    "scaling": (tiny_llama, lambda m: setattr(attention(m), "scaling", 2.0)),
    "epsilon": (tiny_llama, lambda m: setattr(m.model.layers[0].input_layernorm, "variance_epsilon", 9.0)),
    "a window": (with_window, window),
    "adapter": (with_lora, lambda m: m.set_adapter("two")),
    "adapter disabled": (with_lora, lambda m: m.base_model.disable_adapter_layers()),
    "adapter merged": (with_lora, lambda m: m.merge_adapter()),
    "adapter scaled": (with_lora, lambda m: attention(m).k_proj.scaling.update(one=-40.0)),
    "hook": (tiny_llama, lambda m: attention(m).k_proj.register_forward_hook(lambda module, args, out: out * -2)),
    "forward": (tiny_llama, lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: x * 0.1)),
    "forward of a class": (with_own_class, scaled_class),
    "parametrization": (tiny_llama, lambda m: doubled(attention(m).k_proj, "weight", Doubled())),
    "pruning": (tiny_llama, lambda m: prune.random_unstructured(attention(m).k_proj, "weight", 0.9)),
}  # fmt: skip


def sampled(result: Any) -> list[list[int]]:
    return [sample.tokens for sample in result]


@pytest.mark.parametrize("way", WAYS)
class TestNoKVOfOtherWeightsIsUsed:
    @pytest.mark.drawn(8)
    def test_by_a_session(self, way: str) -> None:
        make, change = WAYS[way]
        model = prefixkit.patch(make())
        with Session(model, None, kv_budget="1MiB", page_size=4) as session:
            session.generate([PROMPT], **OPTIONS)
            again = session.generate([PROMPT], **OPTIONS)
            assert again.report.prompt_tokens_found == len(PROMPT), "nothing has changed yet"
            change(model)
            result = session.generate([PROMPT], **OPTIONS)
            assert result.report.prompt_tokens_found == 0
            assert sampled(result) == sampled(prefixkit.generate(model, None, [PROMPT], **OPTIONS))
            assert session.generate([PROMPT], **OPTIONS).report.prompt_tokens_found > 0

    @pytest.mark.drawn(8)
    def test_by_generate(self, way: str) -> None:
        make, change = WAYS[way]
        model = prefixkit.patch(make(), tree_cache="always")
        given = {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.long)}
        given |= {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "output_logits": True}
        given |= {"return_dict_in_generate": True, "pad_token_id": 0}
        model.generate(**given)
        change(model)
        out = model.generate(**given)
        expected = prefixkit.patch(model, tree_cache="never").generate(**given)
        assert out.sequences.tolist() == expected.sequences.tolist()
        for one, two in zip(out.logits, expected.logits, strict=True):
            rounding = 3e-5 if model.dtype == torch.float32 else 0.05
            assert (one - two).abs().max() <= rounding * two.abs().max()


def test_a_long_run_of_equal_calls_compares_all_weights_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """So that a loop of short calls is not slowed down; a sample is compared at each."""
    model = prefixkit.patch(large())
    with Session(model, None, kv_budget="1MiB") as session, caplog.at_level(logging.INFO, logger="prefixkit"):
        for _ in range(12):
            session.generate([PROMPT], **OPTIONS)
        model.model.layers[1].mlp.down_proj.weight.data.mul_(-1)
        assert session.generate([PROMPT], **OPTIONS).report.prompt_tokens_found == 0


def test_all_weights_are_compared_at_each_call_where_that_is_wanted() -> None:
    model = prefixkit.patch(large(), compare_weights="always")
    rows, columns = k(model).shape
    with Session(model, None, kv_budget="1MiB") as session:
        session.generate([PROMPT[:3]], **OPTIONS)  # few tokens, of which a hit saves little
        for row, column in itertools.product(range(0, rows, 8), range(1, columns, 16)):
            k(model).data[row, column] += 0.5
            result = session.generate([PROMPT[:3]], **OPTIONS)
            assert result.report.prompt_tokens_found == 0
        assert session.generate([PROMPT[:3]], **OPTIONS).report.prompt_tokens_found == 3


def test_weights_that_are_loaded_for_each_step_are_new_at_each_call() -> None:
    model = prefixkit.patch(tiny_llama())
    cpu_offload(model, torch.device("cpu"))
    with Session(model, None, kv_budget="1MiB") as session:
        session.generate([PROMPT], **OPTIONS)
        attention(model).k_proj._hf_hook.weights_map["weight"].data.mul_(-3)
        result = session.generate([PROMPT], **OPTIONS)
        assert sampled(result) == sampled(prefixkit.generate(model, None, [PROMPT], **OPTIONS))


def test_a_choice_that_there_is_not_is_refused() -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match="compare_weights must be one of 'auto', 'always', got 'never'"):
        prefixkit.patch(model, compare_weights="never")  # type: ignore[arg-type]
    assert not any("prefixkit" in name for module in model.modules() for name in vars(module))
