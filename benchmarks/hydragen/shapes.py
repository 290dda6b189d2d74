"""Models by their sizes, with random weights: what a step takes does not depend on what the weights say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from prefixkit.attention.sharing import HeadShape
from prefixkit.ops.kv_pool import KVSpec


@dataclass(frozen=True)
class Shape:
    """A Llama of these sizes."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    head_dim: int = 128

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers, bf16."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Of all weights, bf16."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return 2 * (self.layers * (attention + 3 * self.hidden * self.mlp) + 2 * self.vocab * self.hidden)

    def head_shape(self, dtype: torch.dtype) -> HeadShape:
        return HeadShape(self.heads, self.kv_heads, self.head_dim, dtype.itemsize)

    def kv_spec(self, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> KVSpec:
        return KVSpec(layers or self.layers, self.kv_heads, self.head_dim, dtype, device)

    def build(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> LlamaForCausalLM:
        """The model, made where it will run."""
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=131072,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        return model.to(dtype).eval().requires_grad_(False)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("CodeLlama-7B", 4096, 32, 32, 32, 11008, 32016),
        Shape("CodeLlama-13B", 5120, 40, 40, 40, 13824, 32016),
        Shape("Llama-3.1-8B", 4096, 32, 32, 8, 14336, 128256),
        Shape("Yi-6B", 4096, 32, 32, 4, 11008, 64000),
        Shape("8/1 heads", 1024, 1, 8, 1, 1024, 1024),
        Shape("tiny", 64, 2, 4, 2, 96, 260, head_dim=16),
    )
}
