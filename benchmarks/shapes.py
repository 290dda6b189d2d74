"""Models by their sizes, with random weights: the time of a step does not depend on the weights' values."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Shape:
    """A Llama of these sizes; see ``shapes.toml``."""

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
        """Bytes of K and V of one token in all layers, bf16."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    def build(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0, layers: int | None = None) -> Any:
        """The model, made on its device, with ``layers`` of its layers."""
        from transformers import LlamaConfig

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
        return _model(config, device, dtype, seed)


@dataclass(frozen=True)
class Family:
    """A model of another class: the name of its configuration class, and the fields; see ``shapes.toml``."""

    config: str
    fields: dict[str, Any]

    @property
    def vocab(self) -> int:
        return int(self.fields["vocab_size"])

    def build(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Any:
        """The model, made on its device."""
        import transformers

        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return _model(getattr(transformers, self.config)(**self.fields, **ends), device, dtype, seed)


@dataclass(frozen=True)
class Calls:
    """Calls of a session with random prompts; see ``shapes.toml``."""

    prompts: int
    tokens: tuple[int, int]
    shared: int
    samples: int
    new: int

    @property
    def sampled(self) -> int:
        """The number of tokens of a call."""
        return self.prompts * self.samples * self.new

    def random_prompts(self, seed: int, vocab: int) -> list[list[int]]:
        """Token ids of the prompts of one call."""
        rng = np.random.default_rng(seed)
        few_shot = rng.integers(5, vocab, self.shared).tolist()
        lengths = rng.integers(self.tokens[0], self.tokens[1] + 1, self.prompts)
        return [few_shot + rng.integers(5, vocab, length - self.shared).tolist() for length in lengths]


def _model(config: Any, device: torch.device | str, dtype: torch.dtype, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(dtype).eval().requires_grad_(False)


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SHAPES = {name: Shape(name, *sizes) for name, sizes in TABLE["shapes"].items()}
FAMILIES = {name: Family(**found) for name, found in TABLE["families"].items()}
HYBRIDS = {name: Family(**found) for name, found in TABLE["hybrids"].items()}
LATENTS = {name: Family(**found) for name, found in TABLE["latents"].items()}
CALLS = {name: Calls(**found) for name, found in TABLE["calls"].items()}
LLAMA_8B, TINY = SHAPES["Llama-3.1-8B"], SHAPES["tiny"]
