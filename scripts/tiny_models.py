"""Tiny random models of every model_type that transformers generates text with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB, FIRST_WORD = 256, 100  # special tokens have ids below FIRST_WORD
WINDOW = 7  # tokens: shorter than the texts
LAYERS = 2

# Values of config fields, by name; a config gets the values of the fields that it has.
_BY_VALUE: list[tuple[Any, str]] = [
    (
        VOCAB,
        "vocab_size audio_vocab_size decoder_vocab_size pronunciation_vocab_size shape_vocab_size n_token n_words "
        "vocab_size_per_layer_input encoder_hash_byte_group_vocab unpadded_vocab_size",
    ),
    (
        64,
        "hidden_size n_embd d_model dim emb_dim embedding_size embedding_dim word_embed_proj_dim input_embedding_size "
        "output_embedding_size pronunciation_embed_dim shape_embed_dim embed_dim hidden_dim projection_dim "
        "out_hidden_size "
        "backbone_hidden_size lru_width attention_hidden_size d_text router_hidden_size projection_hidden_size "
        "output_dim fpn_hidden_size lm_hidden_size encoder_hidden_size projector_hidden_size output_proj_dims "
        "text_hidden_size vision_hidden_size post_conv_channels out_channels adapter_hidden_size "
        "adapter_in_dim adapter_out_dim adapter_input_size hidden_size_global",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layers n_layer num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers depth num_blocks num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts",
    ),
    (
        4,
        "num_attention_heads n_heads n_head num_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads mamba_num_heads mamba_n_heads "
        "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads "
        "linear_num_heads index_local_blocks index_kpool adapter_rank num_mel_bins",
    ),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads"),
    (
        96,
        "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner dff dim_ff ffn_hidden_size d_inner "
        "feed_forward_size dense_intermediate_size intermediate_size_mlp prefix_dense_intermediate_size",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size q_lora_rank o_lora_rank "
        "expert_ffn_hidden_size shared_experts_intermediate_size moe_shared_expert_intermediate_size "
        "hidden_size_per_layer_input moe_latent_size laurel_rank",
    ),
    (24, "kv_lora_rank"),
    # With few heads scores are often all 0, and which of equal scores are selected is not defined.
    (16, "index_n_heads indexer_n_heads"),
    (
        16,
        "head_dim dim_head d_kv kv_channels d_head attention_head_size linear_head_dim swa_head_dim index_head_dim "
        "indexer_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim global_head_dim "
        "qk_nope_head_dim v_head_dim mamba_d_state state_size ssm_state_size chunk_size mamba_chunk_size",
    ),
    (8, "index_topk qk_rope_head_dim time_step_rank mamba_dt_rank rotary_dim prompt_length"),
    (
        1,
        "n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups first_k_dense_replace "
        "num_dense_layers max_window_layers n_shared_experts decoder_sparse_step",
    ),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions model_max_length"),
    (2.0, "attn_logit_softcapping final_logit_softcapping"),
    (1.0, "clip_qkv"),
    (0.3, "attention_multiplier"),
    (True, "is_decoder use_qk_norm qk_layernorm"),
]
GENERIC = {name: value for value, names in _BY_VALUE for name in names.split()}
WINDOWS: dict[str, Any] = {  # fields that make attention local, in texts longer than WINDOW
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "local_attention": 2 * WINDOW,
    "local_attention_window_len": WINDOW,
    "keep_window_size": WINDOW,
    "use_sliding_window": True,
}
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")  # one entry for each layer
_LATENT = {"head_dim": GENERIC["qk_rope_head_dim"], "num_key_value_heads": GENERIC["num_attention_heads"]}
LOCAL = ("sliding_attention", "chunked_attention")
_ALTERNATE = ["sliding_attention", "full_attention"] * 2
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
# Replaces timm's vision models.
_PLAIN_VISION = {"model_type": "siglip_vision_model", "hidden_size": 64, "num_attention_heads": 4}
_SMALL_VISION = {"num_hidden_layers": 1, "intermediate_size": 96, "image_size": 32, "patch_size": 16}
# Values that the names do not determine, by the model_type of the entry or of a config inside it.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": LAYERS},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(_ALTERNATE[:2], _MROPE)},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 2,
    },
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATE,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "n_recurrent_loops": 3,
        "initializer_range": 0.1,  # by which its scales are divided, and they are drawn of this size
    },
    "dots3_note_text": {
        "per_layer_config": {
            "1": {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 48, "kv_lora_rank": 40}
            | {"head_dim": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 12}
        }
    },
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "ernie4_5_vl_moe_text": {"rope_parameters": _MROPE | {"mrope_section": [3, 3, 2]}},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "fast_vlm": {"vision_config": _PLAIN_VISION},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "inkling2_loop_text": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 3,
    },
    "gemma3n_text": {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": _ALTERNATE},
    "glm4v_moe_text": {"rope_parameters": _MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "glm4v_text": {"rope_parameters": _MROPE},
    "glm_ocr_text": {"rope_parameters": _MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"downsample_rate": "4/8", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_vl_text": {"rope_parameters": _MROPE | {"mrope_section": [2, 2, 2, 2]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # as its checkpoints, not as its default
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "minimax": {"block_size": 8},
    "mistral4": {"head_dim": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}},
    "mpt": {"use_cache": True},  # which its default says not to
    "musicgen_decoder": {"num_codebooks": 1, "decoder_start_token_id": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1, "decoder_start_token_id": 1},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl_text": {"rope_parameters": _MROPE},
    "perception_lm": {"vision_config": _PLAIN_VISION | {"model_args": {"embed_dim": 64}}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 9},
    "qwen2_5_omni_text": {"rope_parameters": _MROPE},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "qwen2_vl_text": {"rope_parameters": _MROPE},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 9},
    "qwen4_exp_text": {"indexer_kv_heads": 1, "indexer_budget": 8, "indexer_compress_ratio": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "udop": {"decoder_start_token_id": 0},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "xlstm": {"chunk_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 8,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,  # whose attention shares its weights
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"]},
}
LONG_CHUNKS = "chunks longer than the texts"  # which are shorter than a chunk: nothing to refuse
_SHARING = {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": _ALTERNATE}
_SCALED = {"no_rope_layers": [1, 0], "floor_scale": 4}  # from the fourth position on
# Features that some configs can turn on: the name, a field that such a config has, and values for it.
_FEATURES: list[tuple[str, str, dict[str, Any]]] = [
    ("values as large as keys", "qk_nope_head_dim", {"v_head_dim": 24}),
    ("values smaller than keys", "v_head_dim", {"v_head_dim": 8}),
    ("layers that share KV", "num_kv_shared_layers", _SHARING),
    ("no layers that share KV", "num_kv_shared_layers", {"num_kv_shared_layers": 0}),
    ("values that are keys", "attention_k_eq_v", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("global heads like local ones", "attention_k_eq_v", {"global_head_dim": 16}),
    (LONG_CHUNKS, "floor_scale", {"attention_chunk_size": 64}),
    ("a layer without rotation", "no_rope_layers", {"no_rope_layers": [1, 0]}),
    ("queries scaled by position", "floor_scale", _SCALED),
    ("queries scaled by position, long chunks", "floor_scale", _SCALED | {"attention_chunk_size": 64}),
]
_ADAPTERS = {"use_mem_rope": True, "use_shared_attention_adapter": True, "num_key_value_heads": 4}
_NGRAMS = {"ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "eos_token_id": 2}
# The same of one model_type: arguments of tiny_config.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "dory": {"KV of the last loop alone": {"recurrent_kv_cache_mode": "last_loop"}},
    "falcon": {"alibi": {"alibi": True}, "the new decoder": {"new_decoder_architecture": True}},
    "olmoe": {"a window that the config was given": {"sliding_window": WINDOW}},
    "qwen4_exp_text": {"embeddings of n-grams": _NGRAMS},
    "zamba2": {"rotation and adapters": _ADAPTERS},
}
_SCALE = "llama_4_scaling_beta"  # of rotary embeddings that scale queries beyond their original positions
# The type of config that a class takes, where it is part of the model's, which an encoder's would have to be given for.
PARTS = {"musicgen": "musicgen_decoder", "musicgen_melody": "musicgen_melody_decoder"}


def variants(model_type: str) -> dict[str, dict[str, Any]]:
    """Arguments of :func:`tiny_config` that together cover the features of a model type, by feature."""
    found: dict[str, dict[str, Any]] = {"windows": {}, "no windows": {"windows": False}, **VARIANTS.get(model_type, {})}
    model_type = PARTS.get(model_type, model_type)
    default = CONFIG_MAPPING[model_type]
    config = _default(default, EXCEPTIONS.get(model_type, {}))
    for name, field, values in _FEATURES:
        found[name] = _where(config, lambda fields, field=field: field in fields, values)
    scaled = {"rope_parameters": {"original_max_position_embeddings": 16}}
    found["queries scaled by rotation"] = _where(config, lambda fields: _SCALE in str(fields), scaled)
    return {name: values for name, values in found.items() if values or name == "windows"}


def _where(config: PreTrainedConfig, knows: Callable[[dict[str, Any]], bool], values: dict[str, Any]) -> dict[str, Any]:
    """Values for a config that knows them, and for those inside it."""
    fields = vars(config)
    inner = {name: one for name, one in fields.items() if isinstance(one, PreTrainedConfig)}
    nested = {name: _where(one, knows, values) for name, one in inner.items()}
    own = values if knows({name: one for name, one in fields.items() if name not in inner}) else {}
    return own | {name: there for name, there in nested.items() if there}


def tiny_config(model_type: str, windows: bool = True, **overrides: Any) -> PreTrainedConfig:
    """A config of a few thousand weights, with local attention in short windows or with none."""
    model_type = PARTS.get(model_type, model_type)
    default = CONFIG_MAPPING[model_type]
    own = EXCEPTIONS.get(model_type, {})
    config: PreTrainedConfig = default(**_merged(_merged(_tiny(_default(default, own), windows), own), overrides))
    if model_type == "gemma3n":
        vars(config)["vision_config"] = _without_timm(config.vision_config)  # the field itself takes one class alone
    return config


def _without_timm(config: PreTrainedConfig) -> PreTrainedConfig:
    """A vision config that transformers builds by itself, with what the rest of Gemma 3n asks of its own."""
    plain = {name: value for name, value in (_PLAIN_VISION | _SMALL_VISION).items() if name != "model_type"}
    asked = {name: getattr(config, name) for name in ("rms_norm_eps", "vocab_offset", "vocab_size")}
    made: PreTrainedConfig = CONFIG_MAPPING[_PLAIN_VISION["model_type"]](**plain, **asked)
    return made


def tiny_model(config: PreTrainedConfig, class_name: str, auto: type = AutoModelForCausalLM) -> PreTrainedModel:
    """A random float32 model in eval mode; its weights are large enough for attention to matter.

    Args:
        config: The config.
        class_name: Its class, for a config that ``auto`` does not know.
        auto: The auto class that chooses the class of all others.
    """
    known: Any = auto if type(config) in auto._model_mapping else None  # type: ignore[attr-defined]
    make = known.from_config if known else getattr(transformers, class_name)._from_config
    model: PreTrainedModel = make(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # sinusoids
                continue
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "norm" not in name:
                parameter.normal_(std=0.1)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _default(config_class: Any, own: dict[str, Any]) -> PreTrainedConfig:
    try:
        made: PreTrainedConfig = config_class()
    except Exception:  # some have no valid default
        made = config_class(**own)
    return made


def _tiny(default: PreTrainedConfig, windows: bool) -> dict[str, Any]:
    """Arguments that make a config like ``default`` tiny."""
    fields, tiny = vars(default), dict[str, Any]()
    special = iter(range(3, FIRST_WORD))
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            tiny[name] = _merged(_tiny(value, windows), EXCEPTIONS.get(value.model_type, {}))
            tiny[name].setdefault("model_type", value.model_type)
        elif name in WINDOWS and (windows or name == "use_sliding_window" or value is None):
            tiny[name] = WINDOWS[name] if windows else False if name == "use_sliding_window" else None
        elif name in GENERIC and isinstance(value, bool) == isinstance(GENERIC[name], bool) and not _kept(value):
            tiny[name] = GENERIC[name]
        elif name.startswith("forced_"):
            tiny[name] = None
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int | list):
            usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
            tiny[name] = usual[name] if name in usual else next(special)
        elif name == "rope_parameters" and value:
            tiny[name] = _short_rope(value)
    kinds = {name: list(dict.fromkeys(fields[name])) for name in _KINDS if fields.get(name)}
    if "layer_types" in kinds:
        if "sliding_window" in fields and kinds["layer_types"] == ["full_attention"]:
            kinds["layer_types"] = ["sliding_attention", "full_attention"]
        if not windows:
            kinds["layer_types"] = [kind if kind not in LOCAL else "full_attention" for kind in kinds["layer_types"]]
    if "qk_rope_head_dim" in fields:  # latent attention
        tiny |= {name: value for name, value in _LATENT.items() if name in fields}
    if kinds:
        layers = max(LAYERS, *map(len, kinds.values()))
        tiny |= {name: (few * layers)[:layers] for name, few in kinds.items()} | {"num_hidden_layers": layers}
    return tiny


def _kept(value: object) -> bool:
    """Whether a default is better than a generic value: a list for the layers, or a zero that turns something off."""
    return isinstance(value, list | tuple | dict) or (value == 0 and not isinstance(value, bool))


def _short_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary embeddings for heads of 16 and texts of 256 tokens."""
    short = {name: _short_rope(value) if isinstance(value, dict) else value for name, value in rope.items()}
    small = {"mrope_section": [2, 3, 3], "original_max_position_embeddings": 128}
    return short | {name: value for name, value in small.items() if name in short}


def _merged(tiny: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """``tiny`` with the values of ``own``, which may be nested."""
    merged = dict(tiny)
    for name, value in own.items():
        nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if nested else value
    return merged
