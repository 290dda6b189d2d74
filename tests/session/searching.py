"""What the tests of search share: a prompt, parameters, and what is compared of nodes."""

from __future__ import annotations

from typing import Any

import torch

from prefixkit import SamplingParams, SearchNode, Session
from prefixkit.testing.integrity import check_tree
from prefixkit.testing.tiny import tiny_llama

PROMPT = "the quick brown fox"
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, stop_token_ids=())
SAMPLED = SamplingParams(temperature=0.9, max_new_tokens=8, stop_token_ids=())


def told(nodes: list[SearchNode]) -> list[tuple[list[int], str | None]]:
    return [(node.tokens, node.finish_reason) for node in nodes]


def assert_empty(session: Session) -> None:
    """Every page is free again, but for those of the prefix cache."""
    store = session.store
    assert store is not None
    check_tree(store.tree)
    assert not store.tree.nodes() and not store.tree.pages_held()


def dense_logprobs(tokens: list[int], prompt: int) -> Any:
    """Log-probabilities of the tokens after the prompt, by a forward of the plain model in float64."""
    with torch.no_grad():
        logits = tiny_llama().double()(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)[torch.arange(prompt - 1, len(tokens) - 1), tokens[prompt:]]
