"""The model that the examples use: SmolLM2-135M-Instruct, or with --tiny a random one that needs no download."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from prefixkit.demo.model import load_demo

END = 256


class Bytes:
    """A tokenizer of one token per byte, as small as one can be."""

    eos_token_id = END

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        return self("".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: ")

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token < END).decode(errors="replace")


def tiny() -> tuple[Any, Any]:
    """A random Llama of two layers, and a tokenizer of bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=END + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config).eval(), Bytes()


def from_arguments(description: str | None, arguments: list[str] | None = None) -> tuple[Any, Any]:
    """The model and tokenizer that the arguments ask for; None takes those of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of SmolLM2-135M-Instruct")
    return tiny() if parser.parse_args(arguments).tiny else load_demo()
