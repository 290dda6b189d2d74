"""A tiny random Llama and a tokenizer of bytes, for tests of the public verbs."""

from __future__ import annotations

import copy
import pickle
from functools import lru_cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = 256
VOCAB = 260
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers, 4 query heads over 2 KV heads, float32; its logits differ enough for clear greedy choices.

    Models of equal arguments are copies of one.  torch's random state afterwards is that of making the model.
    """
    model, state = _made(seed, pickle.dumps(sorted(changes.items())))
    torch.set_rng_state(state)
    return copy.deepcopy(model)


@lru_cache(maxsize=32)
def _made(seed: int, changes: bytes) -> tuple[LlamaForCausalLM, torch.Tensor]:
    """The model that is copied, for a copy takes half as long as another one, and torch's random state after it was
    made.  ``changes``: pickled, so that lists among them can be keys.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": EOS + 1,
        **dict(pickle.loads(changes)),
    }
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.train(False)
    return model, torch.get_rng_state()


class ByteTokenizer:
    """One token per UTF-8 byte, an end token and a padding token."""

    eos_token_id = EOS
    pad_token_id = EOS + 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, list[int]]:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return self(text + "<assistant>")


def byte_tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of transformers without merges; its end-of-text token is that of the tiny model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer
