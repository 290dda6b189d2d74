"""From a patched model to an engine that samples from it: pool, tree, planner, and what decodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import prefixkit.backends  # noqa: F401 - registers them
from prefixkit.attention.uncomputed import prefill_chunk_for
from prefixkit.engine.contexts import context_of
from prefixkit.engine.engine import Engine
from prefixkit.engine.memory import MOST_RUNNING, pool_pages, step_bytes
from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.request import Request
from prefixkit.engine.score import MOST_LOGIT_BYTES
from prefixkit.models import ModelFacts
from prefixkit.models.runner import runner_of
from prefixkit.ops.kv_pool import KVPool
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree.radix import PrefixTree


def make_engine(
    facts: ModelFacts,
    requests: Sequence[Request],
    *,
    kv_budget: float | str | None = None,
    page_size: int = 16,
    prefill_chunk: int | None = None,
    graphs: bool = True,
    compiled: bool = False,
) -> Engine:
    """An engine over a patched model, with a pool that holds what these requests need, within the budget.

    Args:
        facts: Of the patched model.
        requests: What it will be asked.
        kv_budget, page_size, prefill_chunk: See :func:`generate`.
        graphs: Decode by CUDA graphs, where the GPU's kernels run the attention.
        compiled: Layers in these graphs go through torch.compile, which takes seconds, once for each model.
    """
    spec = facts.spec
    chunk = prefill_chunk_for(spec.device) if prefill_chunk is None else prefill_chunk
    workspace = step_bytes(facts.config, spec, requests, chunk)
    num_pages = pool_pages(requests, spec, kv_budget, page_size, workspace)
    return engine_of(facts, num_pages, page_size=page_size, prefill_chunk=chunk, graphs=graphs, compiled=compiled)


def make_scorer(
    facts: ModelFacts,
    prompts: Sequence[NDArray[np.int32]],
    continuations: Sequence[Sequence[NDArray[np.int32]]],
    *,
    kv_budget: float | str | None = None,
    page_size: int = 16,
    prefill_chunk: int | None = None,
) -> Engine:
    """The same for prompts with continuations that are scored, which samples nothing and captures no graphs."""
    spec = facts.spec
    chunk = prefill_chunk_for(spec.device) if prefill_chunk is None else prefill_chunk
    contexts = [
        context_of(prompts, continuations, (index, number))
        for index, each in enumerate(continuations)
        for number in range(len(each))
    ]
    once = SamplingParams(max_new_tokens=1)  # whose pages are those of its prompt
    requests = [Request(index, tokens, once) for index, tokens in enumerate(contexts)]
    # Logits as computed and in float32, and their log-softmax.
    workspace = step_bytes(facts.config, spec, (), chunk) + 3 * MOST_LOGIT_BYTES
    num_pages = pool_pages(requests, spec, kv_budget, page_size, workspace)
    return engine_of(facts, num_pages, page_size=page_size, prefill_chunk=chunk, graphs=False)


def engine_of(
    facts: ModelFacts,
    num_pages: int,
    *,
    page_size: int = 16,
    prefill_chunk: int | None = None,
    graphs: bool = True,
    compiled: bool = False,
    most_running: int = MOST_RUNNING,
    keep_samples: bool = False,
    policy: MemoryPolicy | None = None,
) -> Engine:
    """An engine over a patched model, with a pool of so many pages; see :class:`Engine`."""
    spec = facts.spec
    chunk = prefill_chunk_for(spec.device) if prefill_chunk is None else prefill_chunk
    pool = KVPool(spec, num_pages, page_size)
    runner = runner_of(facts, pool, graphs=graphs, compiled=compiled)
    return Engine(
        runner,
        pool,
        PrefixTree(num_pages, page_size),
        prefill_chunk=chunk,
        most_running=most_running,
        keep_samples=keep_samples,
        policy=policy,
    )
