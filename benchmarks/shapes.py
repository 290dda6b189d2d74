"""Models by their sizes, with random weights: what a step takes does not depend on the weights' values."""

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
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

    def build(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0, layers: int | None = None) -> Any:
        """The model, made where it will run; with ``layers`` of its layers."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=131072,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        )
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.to(dtype).eval().requires_grad_(False)


LLAMA_8B = Shape("Llama-3.1-8B", 4096, 32, 32, 8, 14336, 128256)
TINY = Shape("tiny", 64, 2, 4, 2, 96, 260, head_dim=16)
EVERY = (
    Shape("CodeLlama-7B", 4096, 32, 32, 32, 11008, 32016),
    Shape("CodeLlama-13B", 5120, 40, 40, 40, 13824, 32016),
    LLAMA_8B,
    Shape("Yi-6B", 4096, 32, 32, 4, 11008, 64000),
    Shape("8/1 heads", 1024, 1, 8, 1, 1024, 1024),
    TINY,
    replace(TINY, name="small", hidden=256, layers=4, mlp=768, vocab=32000, head_dim=64),
    replace(TINY, name="words", vocab=32000),
)
SHAPES = {shape.name: shape for shape in EVERY}
