"""What users pass as prompts, turned into token ids and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# One prompt: text, token ids, or chat messages ({"role": ..., "content": ...}).
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def encode_prompts(tokenizer: Any, prompts: Prompt | Iterable[Prompt], vocab_size: int) -> list[NDArray[np.int32]]:
    """Token ids of each prompt.

    Args:
        tokenizer: Encodes text, with its special tokens, and chat messages, with its chat template and the start of an answer.
        prompts: A list of prompts, each a string, a list (or array) of token ids, or a list of chat messages.  A single
            string counts as a list of one.
        vocab_size: The model's.

    Raises:
        ValueError: no prompts, an empty prompt, padding, or a token outside the vocabulary.
        TypeError: something that is no prompt.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping):
        raise TypeError(
            f"prompts must be a list of prompts, got a {type(prompts).__name__} with keys {sorted(prompts)}; "
            "pass the texts themselves, or one list of token ids per prompt without padding"
        )
    encoded = [_encode(tokenizer, prompt, index) for index, prompt in enumerate(prompts)]
    if not encoded:
        raise ValueError("prompts is empty; pass at least one prompt")
    _refuse_padding(encoded, getattr(tokenizer, "pad_token_id", None), prompts)
    for index, tokens in enumerate(encoded):
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(outside):
            raise ValueError(
                f"prompt {index}: token {int(outside[0])} is outside the model's vocabulary of {vocab_size}; "
                "encode with the model's own tokenizer"
            )
    return [tokens.astype(np.int32) for tokens in encoded]


def _encode(tokenizer: Any, prompt: object, index: int) -> NDArray[np.int64]:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"prompt {index} is an empty string; give the model at least one token to continue")
        tokens = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        tokens = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
    else:
        tokens = prompt
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(
            f"prompt {index} must be a string, a list of token ids or a list of chat messages, got {type(prompt).__name__}"
            f" of shape {list(array.shape)}"
        )
    if array.size == 0:
        raise ValueError(f"prompt {index} has no tokens; give the model at least one token to continue")
    return array.astype(np.int64)


def _refuse_padding(encoded: list[NDArray[np.int64]], pad: int | None, prompts: object) -> None:
    """A rectangular batch whose rows begin or end with the padding token was padded; prompts of a tree need none."""
    rectangular = getattr(prompts, "ndim", 1) == 2  # a tensor or an array; lists are taken as they are
    if not rectangular or pad is None:
        return
    for index, tokens in enumerate(encoded):
        side = "left" if tokens[0] == pad else "right" if tokens[-1] == pad else None
        if side:
            raise ValueError(
                f"prompt {index} is padded on the {side} (token {pad}); pass a list with one list of token ids per prompt, "
                "of any lengths: prefixkit needs no padding and would take it for text"
            )
