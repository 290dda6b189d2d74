"""Tiny random models, and a driver that runs the uncomputed tokens of a tree through one of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prefixkit.attention.bsr import Queries
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.attention.step import Step, build_step
from prefixkit.backends.torch.planner import TorchPlanner
from prefixkit.models import ModelRunner, kv_spec, patch, query_heads
from prefixkit.ops.kv_pool import KVPool
from prefixkit.tree import Node, PrefixTree

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
# What makes each family show its peculiarities in two layers.
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
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "norm" not in name:
                parameter.normal_(std=0.1)
    return model.eval()


class TreeDriver:
    """A model with a tree and a pool; remembers the logits after every prefix that it has run.

    The model is patched in a copy, so that the one given stays a reference.
    """

    def __init__(self, model: nn.Module, num_pages: int = 64, page_size: int = 4) -> None:
        self.model = patch(copy.deepcopy(model))
        self.tree = PrefixTree(num_pages, page_size)
        self.pool = KVPool(kv_spec(self.model), num_pages, page_size)
        self.runner = ModelRunner(self.model, self.pool)
        spec = self.pool.spec
        shape = HeadShape(query_heads(self.model), spec.kv_heads, spec.head_dim, spec.dtype.itemsize)
        self.planner = TorchPlanner(shape, CPU_COST)
        self.logits: dict[tuple[int, ...], Tensor] = {}
        self.tokens_run = 0

    def step(self, budget: int = 10**6, logit_rows: list[int] | None = None) -> Step | None:
        """The step for the first ``budget`` uncomputed tokens, with every row's logits unless told otherwise."""
        self.runs: list[tuple[Node, int, int]] = []
        for node, ready, length in self.tree.pending():
            if budget and self._has_all_above(node):
                self.runs.append((node, ready, min(length, ready + budget)))
                budget -= self.runs[-1][2] - ready
        if not self.runs:
            return None
        index = {node.id: i for i, node in enumerate(self.tree.nodes())}
        runs = np.array([(index[node.id], begin, end) for node, begin, end in self.runs], dtype=np.int32)
        tokens = np.concatenate([node.tokens[begin:end] for node, begin, end in self.runs])
        wanted = np.arange(len(tokens)) if logit_rows is None else np.array(logit_rows, dtype=np.int64)
        return build_step(self.tree.snapshot(), Queries(*runs.T.copy()), tokens, wanted, self.planner)

    def run(self, budget: int = 10**6) -> None:
        """Run steps of at most ``budget`` tokens until all are computed."""
        while (step := self.step(budget)) is not None:
            logits = self.runner(step)
            assert logits.shape == (len(step.tokens), VOCAB)
            rows = [(node, at) for node, begin, end in self.runs for at in range(begin, end)]
            for (node, at), row in zip(rows, logits, strict=True):
                self.logits[(*_tokens_above(node), *node.tokens[: at + 1].tolist())] = row
            self.tree.mark_ready([node for node, _, _ in self.runs], [end for _, _, end in self.runs])
            self.tokens_run += len(rows)

    def logits_of(self, tokens: list[int]) -> Tensor:
        """``[len(tokens), vocab]`` what the tree said after each prefix of ``tokens``."""
        return torch.stack([self.logits[tuple(tokens[: end + 1])] for end in range(len(tokens))])

    def _has_all_above(self, node: Node) -> bool:
        above = node.parent
        return (
            above is None or above.ready == above.length or any(n is above and e == n.length for n, _, e in self.runs)
        )


def _tokens_above(node: Node) -> list[int]:
    return [] if node.parent is None else [*_tokens_above(node.parent), *node.parent.tokens.tolist()]


def dense(model: nn.Module, tokens: list[int]) -> Tensor:
    """``[len(tokens), vocab]`` what a model says in one pass over the text alone."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    return make_model


@pytest.fixture
def drive() -> type[TreeDriver]:
    return TreeDriver


@pytest.fixture
def dense_logits() -> Callable[[nn.Module, list[int]], Tensor]:
    return dense


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced and run as torch's own operations, which takes no compiler."""
    from torch._dynamo.backends.debugging import aot_eager

    import prefixkit.models.compile.layers as compiled_module

    torch._dynamo.reset()
    monkeypatch.setattr(compiled_module, "inductor", lambda graph, inputs: aot_eager(graph, inputs))
