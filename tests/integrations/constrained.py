"""What tests of grammars share: a tokenizer with merges, a model with a padded vocabulary, exact expectations."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import prefixkit
from prefixkit.engine.runs.token_bytes import TokenBytes
from prefixkit.testing.tiny import tiny_llama

MERGES = ["a b", "b c", "ab c", '{ "', '" :', "1 2", "t r", "u e", "tr ue", "\u00c3 \u00a9"]
PADDING = 37
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z é]{0,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "active"],
    "additionalProperties": False,
}
REGEX = r"[ab]{1,3}(c|[0-9]{2})"
EBNF = 'root ::= "(" root ")" root | [a-c]'


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with tokens of several bytes, so that most texts can be spelled in several ways."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {pair.replace(" ", ""): len(vocab) + number for number, pair in enumerate(MERGES)}
    merges = [tuple(pair.split(" ")) for pair in MERGES]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")


def padded_model(tokenizer: Any, **changes: Any) -> Any:
    """A patched model with more tokens than its tokenizer has."""
    size = {"vocab_size": len(tokenizer) + PADDING, "initializer_range": 0.12}
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return prefixkit.patch(tiny_llama(**{**size, **special, **changes}))


def is_valid(text: str) -> bool:
    """Whether it is JSON of the schema above."""
    found = json.loads(text)
    assert list(found) == ["name", "age", "tags", "active"], found
    assert isinstance(found["name"], str) and len(found["name"]) <= 8
    assert type(found["age"]) is int and 0 <= found["age"] <= 150
    assert len(found["tags"]) <= 3 and set(found["tags"]) <= {"red", "blue"}
    return type(found["active"]) is bool


def in_brackets(text: str) -> bool:
    """Whether it is of the grammar above."""
    while text != (shorter := re.sub(r"\([a-c]\)(?=[a-c])", "", text)):
        text = shorter
    return re.fullmatch("[a-c]", text) is not None


def spellings(
    model: Any, tokenizer: Any, prompt: list[int], texts: set[bytes], end: int
) -> dict[tuple[int, ...], float]:
    """The probability of each way to spell each text, and of the end token after it.

    Each token is sampled by the model's probabilities, renormalised over those after which some text can follow.
    """
    token_bytes = TokenBytes.of(tokenizer)
    bytes_of = {t: token_bytes[t] for t in range(len(tokenizer)) if t not in tokenizer.all_special_ids}
    found: dict[tuple[int, ...], float] = {}

    def go_on(tokens: tuple[int, ...], text: bytes, likely: float) -> None:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1].double()
        may = [t for t, own in bytes_of.items() if any(one.startswith(text + own) for one in texts)]
        may += [end] * (text in texts)
        for token, own in zip(may, logits[may].softmax(-1).tolist(), strict=True):
            if token == end:
                found[(*tokens, end)] = likely * own
            else:
                go_on((*tokens, token), text + bytes_of[token], likely * own)

    go_on((), b"", 1.0)
    assert abs(sum(found.values()) - 1) < 1e-9
    return found


def assert_drawn_from(samples: Any, expected: dict[tuple[int, ...], float]) -> None:
    """Samples are as likely as expected: chi-square over those that are not too rare, the others together."""
    from scipy.stats import chisquare  # which each worker would import for most of a second

    counts = Counter(tuple(sample.tokens) for sample in samples)
    assert counts.keys() <= expected.keys()
    likely = {one: share for one, share in expected.items() if share * len(samples) >= 5}
    seen = [counts[one] for one in likely]
    means = [share * len(samples) for share in likely.values()]
    if (rest := len(samples) - sum(means)) > 1e-6 * len(samples):
        seen, means = [*seen, len(samples) - sum(seen)], [*means, rest]
    assert len(seen) > 8
    assert chisquare(seen, means).pvalue > 1e-4
    for sample in samples[:50]:
        np.testing.assert_allclose(sum(sample.logprobs), np.log(expected[tuple(sample.tokens)]), atol=1e-4)
