"""Calls that go on from earlier samples: the KV that stays in the pool is that of its texts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import Session
from prefixkit.engine.request import Request
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree import Node
from tests.gpu.test_model import model_of


def paths(session: Session) -> Iterator[list[Node]]:
    """The nodes from below the root to each leaf of the session's tree."""
    for leaf in session.store.tree.every_node():
        if not leaf.branches and leaf.parent is not None:
            path = [leaf]
            while (above := path[-1].parent) is not None and above.parent is not None:
                path.append(above)
            yield path[::-1]


def kv_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """``[tokens, numbers]`` float32 the KV of a text in all layers, by one forward pass."""
    with torch.no_grad():
        cache = model(torch.tensor([tokens], device=model.device), use_cache=True).past_key_values
    parts = [part[0].transpose(0, 1).flatten(1) for layer in cache.layers for part in (layer.keys, layer.values)]
    return torch.cat(parts, 1).float()


def pooled(session: Session, node: Node, layers: int) -> torch.Tensor:
    """The same of a node's computed tokens, from the pool."""
    slots = torch.from_numpy(node.slots[: node.computed])
    pages = [part.flatten(0, 1) for layer in range(layers) for part in session.store.pool.pages(layer)]
    return torch.cat([part[slots.to(part.device)].flatten(1) for part in pages], 1).float()


def assert_pool(session: Session, model: Any, exact: Any) -> None:
    """No token's KV errs by more than 1.5 times the largest error of the unpatched model's."""
    ours, stock = [], []
    for path in paths(session):
        text = [token for node in path for token in node.tokens.tolist()]
        truth = kv_of(exact, text)
        size = truth.norm(dim=1)
        stock.append((kv_of(model, text) - truth).norm(dim=1) / size)
        for node in path:
            own = slice(node.start, node.start + node.computed)
            found = pooled(session, node, model.config.num_hidden_layers)
            ours.append((found - truth[own]).norm(dim=1) / size[own])
    assert float(torch.cat(ours).max()) <= 1.5 * float(torch.cat(stock).max()), f"{len(ours)} nodes"


@pytest.mark.parametrize("compiled", [False, True])
def test_kv_stays_as_it_was_computed_whatever_ends_and_goes_on(compiled: bool) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    rng = np.random.default_rng(seed)
    model = model_of(128, torch.bfloat16)
    exact, patched = copy.deepcopy(model).float(), prefixkit.patch(copy.deepcopy(model))
    head = rng.integers(0, 256, int(rng.integers(20, 60))).tolist()
    with Session(patched, most_running=16, compiled=compiled) as session:
        # The first ends while the second, which then fills its last page for one of these lengths, runs its last step.
        for most in range(2, 18):
            asked = [SamplingParams(max_new_tokens=one, seed=most, stop_token_ids=()) for one in (most, most + 1, 40)]
            session.run([Request(i, np.array([*head, i]), params) for i, params in enumerate(asked)])
        assert session.report.graph_steps > 0
        known = [head]
        for turn in range(4):
            prompts = [[*known[rng.integers(len(known))], *rng.integers(0, 256, rng.integers(1, 4))] for _ in range(8)]
            most, stop = rng.integers(1, 24, len(prompts)).tolist(), range(40)
            asked = [SamplingParams(n=3, max_new_tokens=one, seed=turn, stop_token_ids=stop) for one in most]
            each = enumerate(zip(prompts, asked, strict=True))
            samples = session.run([Request(i, np.array(one), params) for i, (one, params) in each]).samples
            known = [[*map(int, prompts[one.prompt_index]), *one.tokens] for one in samples]
        assert_pool(session, model, exact)
    prefixkit.unpatch(patched)
