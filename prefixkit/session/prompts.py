"""What users pass as prompts, turned into token ids and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.sampling.params import as_list

# Other roles that a padding token may have: it may then begin or end a prompt on purpose.
_ROLES = ("bos_token_id", "eos_token_id", "unk_token_id", "sep_token_id", "cls_token_id")

# One prompt: text, token ids, or chat messages ({"role": ..., "content": ...}).
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Unpadded(list[int]):
    """Token ids without padding, even if they begin or end with the padding token."""


def encode_prompts(tokenizer: Any, prompts: Prompt | Iterable[Prompt], vocab_size: int) -> list[NDArray[np.int32]]:
    """Token ids of each prompt, as :func:`prefixkit.generate` takes them; a single string counts as a list of one.

    Raises:
        ValueError: no prompts, an empty prompt, padding (see :func:`refuse_padding`), text without a tokenizer, or a
            token outside the vocabulary.
        TypeError: one of them is not a prompt, or ``tokenizer`` not a tokenizer.
    """
    check_tokenizer(tokenizer)
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping):
        raise TypeError(
            f"prompts must be a list of prompts, got a {type(prompts).__name__} with keys {list(prompts)}; "
            'pass the texts themselves, or their token ids without padding: tokenizer(texts)["input_ids"]'
        )
    given = as_list("prompts", prompts, "prompts")
    encoded = [_encode(tokenizer, prompt, index) for index, prompt in enumerate(given)]
    if not encoded:
        raise ValueError("prompts is empty; pass at least one prompt")
    several = len(given) > 1 or getattr(prompts, "ndim", 1) == 2  # a tensor or an array is a batch, even of one row
    if several and not any(isinstance(prompt, str | Unpadded) or _is_chat(prompt) for prompt in given):
        refuse_padding(encoded, tokenizer)
    for index, tokens in enumerate(encoded):
        check_ids(f"prompt {index}", tokens, vocab_size)
    return [tokens.astype(np.int32) for tokens in encoded]


def check_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError for what neither encodes text nor decodes tokens, such as a tokenizer's name."""
    if not (tokenizer is None or callable(tokenizer) or hasattr(tokenizer, "decode")):
        raise TypeError(
            f"tokenizer must be a tokenizer of transformers, or None, got {type(tokenizer).__name__} {tokenizer!r}; "
            "load one: AutoTokenizer.from_pretrained(name)"
        )


def check_ids(where: str, tokens: NDArray[np.integer], vocab_size: int) -> None:
    """Raise ValueError if a token is outside the vocabulary; ``where`` names the text in the message."""
    if len(outside := tokens[(tokens < 0) | (tokens >= vocab_size)]):
        raise ValueError(
            f"{where}: token {int(outside[0])} is outside the model's vocabulary of {vocab_size}; "
            "encode with the model's own tokenizer"
        )


def _encode(tokenizer: Any, prompt: object, index: int) -> NDArray[np.int64]:
    if tokenizer is None and (isinstance(prompt, str) or _is_chat(prompt)):
        what = "text" if isinstance(prompt, str) else "a list of chat messages"
        raise ValueError(
            f"prompt {index} is {what}, but tokenizer is None; pass the model's tokenizer, or lists of token ids"
        )
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"prompt {index} is an empty string; give the model at least one token to continue")
        tokens = text_tokens(tokenizer, prompt, f"prompt {index}")
    elif isinstance(prompt, Mapping):
        if "role" in prompt:
            raise TypeError(f"prompt {index} is one chat message; a prompt is a list of messages: pass [messages]")
        raise TypeError(
            f"prompt {index} is a {type(prompt).__name__} with keys {list(prompt)}; pass its token ids: "
            'tokenizer(text)["input_ids"]'
        )
    elif _is_chat(prompt):
        encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
        tokens = encoded["input_ids"]
    elif hasattr(prompt, "new_tokens"):
        raise TypeError(f"prompt {index} is a {type(prompt).__name__}; pass its token ids: node.tokens")
    else:
        tokens = prompt
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise _no_prompt(prompt, array, index)
    if array.size == 0:
        raise ValueError(f"prompt {index} has no tokens; give the model at least one token to continue")
    return array.astype(np.int64)


def _no_prompt(prompt: object, array: NDArray[Any], index: int) -> TypeError:
    """The error for a prompt that is neither text nor one list of integers."""
    got, remedy = f"{type(prompt).__name__} {prompt!r}", ""
    if array.ndim == 0 and np.issubdtype(array.dtype, np.integer):
        remedy = "; put the token ids of a single prompt into a list: [token_ids]"
    elif array.ndim > 0:
        got = f"{type(prompt).__name__} of shape {list(array.shape)} and dtype {array.dtype}"
        remedy = "; pass each row by itself" if array.ndim > 1 else "; token ids are integers"
    return TypeError(
        f"prompt {index} must be a string, a list of token ids or a list of chat messages, got {got}{remedy}"
    )


def text_tokens(tokenizer: Any, text: str, where: str, **options: Any) -> Any:
    """The token ids of a text, from a tokenizer called with ``options``; ``where`` names the text in messages.

    Raises:
        ValueError: the text holds a lone surrogate, as JSON may; tokenizers report only that the input is not text.
    """
    try:
        return tokenizer(text, **options)["input_ids"]
    except (TypeError, UnicodeEncodeError) as error:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError(
                f"{where} holds a lone surrogate, which UTF-8 cannot encode; replace it: "
                "text.encode(errors='replace').decode()"
            ) from error
        raise


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def refuse_padding(encoded: Sequence[NDArray[np.integer]], tokenizer: Any, what: str = "prompt") -> None:
    """Refuse token ids that a tokenizer padded: prefixkit would take padding for text.

    The rule: several lists of token ids of one length, or the rows of a 2-D array, are padded if one of them begins or
    ends with the tokenizer's padding token.  If that token has another role too, such as end of text, one such token is
    often intended, and only two in a row count as padding.
    """
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None or len({len(tokens) for tokens in encoded}) > 1:
        return
    fewest = 2 if pad in {getattr(tokenizer, role, None) for role in _ROLES} else 1
    for index, tokens in enumerate(encoded):
        if len(tokens) < fewest:
            continue
        side = "left" if (tokens[:fewest] == pad).all() else "right" if (tokens[-fewest:] == pad).all() else None
        if side:
            raise ValueError(
                f"{what} {index} is padded on the {side} (token {pad}), which would be taken for text; pass lists "
                'without padding, of any lengths: tokenizer(texts)["input_ids"]; '
                "or set tokenizer.pad_token = None, if these tokens are meant"
            )


def occurrences(prompts: Iterable[NDArray[np.int32]]) -> list[int]:
    """For each prompt how many before it have the same tokens: 0, 1, 2, ... among equal ones, in their order."""
    seen: Counter[bytes] = Counter()
    numbers = []
    for tokens in prompts:
        numbers.append(seen[key := tokens.tobytes()])
        seen[key] += 1
    return numbers
