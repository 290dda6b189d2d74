"""Prompts for the engine over a fake model, its runs, and the expected samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prefixkit.engine.request import BeamParams, Request, Sample
from prefixkit.engine.runs.beam import BeamSearch, advance, finished, num_candidates
from prefixkit.runners.sampler import top_tokens
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.rng import sample_key, uniforms
from prefixkit.sampling.specification import sample_tokens
from prefixkit.testing.engines import ReportingEngine
from prefixkit.testing.fake_model import VOCAB, logits_after
from prefixkit.testing.integrity import check_tree


def alone(prompt: Sequence[int], params: SamplingParams, index: int) -> list[int]:
    """The expected tokens of sample ``index``, sampled token by token, alone."""
    return list(_alone(tuple(map(int, prompt)), params, index))


@cache
def _alone(prompt: tuple[int, ...], params: SamplingParams, index: int) -> list[int]:
    tokens, steps = list(prompt), np.arange(params.max_new_tokens)
    for u in uniforms(np.full(len(steps), sample_key(params.seed, index, prompt)), steps)[:, None]:
        token = int(sample_tokens(torch.from_numpy(logits_after(tokens))[None], params, u, [np.array(tokens)])[0])
        tokens.append(token)
        if token in (params.stop_token_ids or ()):
            break
    return tokens[len(prompt) :]


def beams_alone(prompt: Sequence[int], params: BeamParams) -> Any:
    """The expected beams of a search, best first, replayed over whole sequences."""
    search = BeamSearch(params)
    while not search.done:
        after = torch.from_numpy(np.stack([logits_after([*prompt, *beam.tokens]) for beam in search.beams]))
        likeliest = top_tokens(after, num_candidates(params), after.log_softmax(-1).amax(-1))
        ((search, _),) = advance([search], *(part.numpy() for part in likeliest))
    return finished(search)


def random_prompts(seed: int, count: int = 8) -> list[NDArray[np.int64]]:
    """Prompts with shared prefixes, a duplicate, and one that is a prefix of another."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    head = rng.integers(0, VOCAB, 23)
    prompts = [np.concatenate([head, rng.integers(0, VOCAB, rng.integers(1, 12))]) for _ in range(count - 3)]
    return [*prompts, prompts[0], head[:10], rng.integers(0, VOCAB, 5)]


def run(engine: ReportingEngine, prompts: Iterable[Any], params: SamplingParams | BeamParams) -> list[Sample]:
    """The samples of these prompts, all with the same parameters."""
    return engine.run(Request(i, prompt, params) for i, prompt in enumerate(prompts))


def assert_all_given_back(engine: ReportingEngine) -> None:
    """Assert that no sequence is left, and that all pages but those of the prefix cache are free."""
    check_tree(engine.store.tree)
    assert engine.store.tree.pages_held() == 0
    engine.store.cache.clear()
    check_tree(engine.store.tree)
    assert engine.store.tree.allocator.free == engine.store.tree.allocator.num_pages
