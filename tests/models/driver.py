"""A driver that runs the uncomputed tokens of a tree through a model, and the model without a tree."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import prefixkit.backends  # noqa: F401 - registers them
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.step import Step, build_step
from prefixkit.kv.kv_pool import KVPool
from prefixkit.models import ModelRunner, facts_of, kv_spec, patch
from prefixkit.models.steps.step_runner import planners_of
from prefixkit.tree import Node, PrefixTree
from tests.models.tiny_families import VOCAB
from tests.tree.model import uncomputed


class TreeDriver:
    """A model with a tree and a pool; remembers the logits after every prefix that it has run.

    The model is patched in a copy, so that the one given stays a reference, unless it shall be the one that runs.
    """

    def __init__(
        self, model: nn.Module, num_pages: int = 64, page_size: int = 4, copied: bool = True, variant: Any = None
    ) -> None:
        self.model = patch(copy.deepcopy(model) if copied else model, variant=variant)
        self.tree = PrefixTree(num_pages, page_size)
        self.pool = KVPool(kv_spec(self.model), num_pages, page_size)
        self.runner = ModelRunner(self.model, self.pool)
        self.planners = planners_of(facts_of(self.model))
        self.logits: dict[tuple[int, ...], Tensor] = {}
        self.tokens_run = 0

    def step(self, budget: int = 10**6, logit_rows: list[int] | None = None) -> Step | None:
        """The step for the first ``budget`` uncomputed tokens, with every row's logits unless told otherwise."""
        self.runs: list[tuple[Node, int, int]] = []
        for node, computed, length in uncomputed(self.tree):
            if budget and self._has_all_above(node):
                self.runs.append((node, computed, min(length, computed + budget)))
                budget -= self.runs[-1][2] - computed
        if not self.runs:
            return None
        index = {node.id: i for i, node in enumerate(self.tree.nodes())}
        runs = np.array([(index[node.id], begin, end) for node, begin, end in self.runs], dtype=np.int32)
        tokens = np.concatenate([node.tokens[begin:end] for node, begin, end in self.runs])
        wanted = np.arange(len(tokens)) if logit_rows is None else np.array(logit_rows, dtype=np.int64)
        return build_step(StepTree(self.tree.snapshot(), Queries(*runs.T.copy())), tokens, wanted, self.planners)

    def run(self, budget: int = 10**6) -> None:
        """Run steps of at most ``budget`` tokens until all are computed."""
        while (step := self.step(budget)) is not None:
            logits = self.runner(step)
            assert logits.shape == (len(step.tokens), VOCAB)
            rows = [(node, at) for node, begin, end in self.runs for at in range(begin, end)]
            for (node, at), row in zip(rows, logits, strict=True):
                self.logits[(*_tokens_above(node), *node.tokens[: at + 1].tolist())] = row
            self.tree.mark_computed([node for node, _, _ in self.runs], [end for _, _, end in self.runs])
            self.tokens_run += len(rows)

    def logits_of(self, tokens: list[int]) -> Tensor:
        """``[len(tokens), vocab]`` what the tree said after each prefix of ``tokens``."""
        return torch.stack([self.logits[tuple(tokens[: end + 1])] for end in range(len(tokens))])

    def _has_all_above(self, node: Node) -> bool:
        above = node.parent
        return (
            above is None
            or above.computed == above.length
            or any(n is above and e == n.length for n, _, e in self.runs)
        )


def _tokens_above(node: Node) -> list[int]:
    return [] if node.parent is None else [*_tokens_above(node.parent), *node.parent.tokens.tolist()]


def dense(model: nn.Module, tokens: list[int]) -> Tensor:
    """``[len(tokens), vocab]`` what a model says in one pass over the text alone."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


def decided_by_rounding(model: nn.Module, tokens: list[int], noise: float = 1e-5, moves: float = 1e-2) -> Tensor:
    """``[len(tokens)]`` whether the model itself says something else after a token once its embeddings are disturbed.

    A router that finds two experts equally good but for rounding takes either: no other computation has to agree.
    """
    plain, found = dense(model, tokens), torch.zeros(len(tokens), dtype=torch.bool)
    handle = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: out * (1 + noise * torch.randn_like(out))
    )
    try:
        for _ in range(20):
            found |= (dense(model, tokens) - plain).abs().amax(-1) > moves
    finally:
        handle.remove()
    return found
