"""The model that the examples use: SmolLM2-135M-Instruct, or with --tiny a random one that needs no download."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as bpe
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from prefixkit.evaluation.demo.model import load_demo

END = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {one: token for token, one in enumerate(alphabet)} | {"<end>": END}
    tokenizer = Tokenizer(bpe.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    chat = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}assistant: "
    ends = {"eos_token": "<end>", "pad_token": "<end>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat, **ends)


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
        pad_token_id=END,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval(), byte_tokenizer()


def parse(description: str | None, arguments: list[str] | None, **flags: str) -> argparse.Namespace:
    """``--tiny`` and these flags, with what each does; None for the arguments takes those of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags["tiny"] = "a tiny random model instead of SmolLM2-135M-Instruct"
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser.parse_args(arguments)


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and tokenizer that the options ask for."""
    return tiny() if options.tiny else load_demo()


def from_arguments(description: str | None, arguments: list[str] | None = None) -> tuple[Any, Any]:
    """The model and tokenizer that the arguments ask for; None takes those of the command line."""
    return load(parse(description, arguments))
