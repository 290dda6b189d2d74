"""Tiny random models of each family, with its peculiarities."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 128
WINDOW = 7  # shorter than the texts of the tests
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
WIDE_HEADS = {"head_dim": 24}  # heads x head_dim is not the hidden size
ALTERNATE = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
OPTIONAL_WINDOW = {"use_sliding_window": True, "max_window_layers": 0, **ALTERNATE}
SOFT_CAP = {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0, **ALTERNATE}
FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHORT_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
# Families that every test of a family runs, and what makes each show its peculiarities in two layers.
PECULIAR: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "arcee": WIDE_HEADS,
    "cohere": {"use_qk_norm": True},
    "cohere2": WIDE_HEADS | ALTERNATE,
    "cwm": WIDE_HEADS | ALTERNATE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "dots1": WIDE_HEADS
    | ALTERNATE
    | FEW_EXPERTS
    | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "ernie4_5": WIDE_HEADS,
    "exaone4": WIDE_HEADS | ALTERNATE | {"sliding_window_pattern": 2},
    "gemma": WIDE_HEADS,
    "gemma2": WIDE_HEADS | SOFT_CAP,
    "gemma3_text": WIDE_HEADS | ALTERNATE | {"query_pre_attn_scalar": 10},
    "glm": WIDE_HEADS,
    "glm4": WIDE_HEADS,
    "glm4_moe": WIDE_HEADS | FEW_EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "gpt_oss": WIDE_HEADS
    | ALTERNATE
    | {"num_experts_per_tok": 2, "num_local_experts": 4, "rope_parameters": SHORT_YARN},
    "granite": {
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "granitemoe": {"attention_multiplier": 0.3, "num_local_experts": 4},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": WIDE_HEADS,
    "llama": WIDE_HEADS,
    "ministral": WIDE_HEADS | ALTERNATE,
    "ministral3": WIDE_HEADS
    | {"sliding_window": WINDOW, "rope_parameters": SHORT_YARN | {"llama_4_scaling_beta": 0.1}},
    "mistral": WIDE_HEADS | {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4},
    "nemotron": WIDE_HEADS,
    "olmo": {"clip_qkv": 1.0},
    "olmo3": ALTERNATE,
    "phi": {"qk_layernorm": True},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": OPTIONAL_WINDOW,
    "qwen3": WIDE_HEADS | OPTIONAL_WINDOW,
    "qwen3_moe": WIDE_HEADS | FEW_EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW, "num_experts": 4},
    "seed_oss": WIDE_HEADS,
    "smollm3": {"use_sliding_window": True, "no_rope_layers": [1, 0], **ALTERNATE},
    "stablelm": {"qk_layernorm": True},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": WIDE_HEADS | SOFT_CAP,
}


def make_model(model_type: str = "llama", seed: int | None = None, **overrides: Any) -> PreTrainedModel:
    """A random model of the family, float32 and in eval mode; its weights are large enough for attention to matter.

    Eager because it is the reference: older transformers let Gemma-2 choose SDPA, which drops its soft cap.
    """
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    print(f"make_model({model_type!r}, seed={seed})")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **PECULIAR.get(model_type, {}), **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # sinusoids
                continue
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "norm" not in name:
                parameter.normal_(std=0.1)
    return model.eval()
