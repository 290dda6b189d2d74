"""Assembly of the engine of a patched model: pool, tree, planner and runner."""

from __future__ import annotations

from collections.abc import Sequence

import prefixkit.backends  # noqa: F401 - registers the backends
from prefixkit.engine.engine import Engine
from prefixkit.engine.memory import MOST_RUNNING, pool_pages, step_bytes
from prefixkit.engine.policy import EngineSettings
from prefixkit.engine.request import Request
from prefixkit.engine.scoring.score import MOST_LOGIT_BYTES
from prefixkit.kv.limits import bytes_for_workspace, left_for_states
from prefixkit.kv.store import KVStore
from prefixkit.models import ModelFacts
from prefixkit.models.model_stores import kind_of, stores_of
from prefixkit.models.steps.step_runner import runner_of, state_for_runner
from prefixkit.models.tensor_parallel import refuse_sharded


def make_engine(
    facts: ModelFacts,
    requests: Sequence[Request],
    *,
    kv_budget: float | str | None = None,
    page_size: int = 16,
    prefill_chunk: int | None = None,
    graphs: bool = True,
    compiled: bool = False,
    scores: bool = False,
) -> Engine:
    """An engine over a patched model, with a pool for the KV of these requests, within the budget.

    Its arguments are those of :func:`prefixkit.generate`; ``graphs``: decode with CUDA graphs if the kernels of
    prefixkit support it; ``scores``: each request is a text whose tokens are scored, and nothing is sampled.
    """
    refuse_sharded(facts.inner)
    spec, kind = facts.spec, kind_of(facts, page_size, compiled=compiled)
    settings = EngineSettings(prefill_chunk, MOST_RUNNING)
    workspace = step_bytes(facts.config, spec, () if scores else requests, settings.chunk_for(spec.device))
    if scores:
        workspace += 3 * MOST_LOGIT_BYTES  # logits as computed and in float32, and their log-softmax
    stores = stores_of(facts.inner)
    stores.agreement.check("requests", lambda: requests)
    free = stores.free(spec, bytes_for_workspace(spec, workspace))
    num_pages = pool_pages(requests, spec, kv_budget, page_size, free, workspace, None if scores else facts.held)
    store = stores.make(kind, num_pages)
    store.most_state_bytes = left_for_states(spec, kv_budget, num_pages * page_size)
    return engine_of(facts, store, settings, graphs=graphs, compiled=compiled)


def engine_of(
    facts: ModelFacts, store: KVStore, settings: EngineSettings, *, graphs: bool = True, compiled: bool = False
) -> Engine:
    """An engine over a patched model and a store of its KV; the runner stays with the store."""
    key = "runner of calls", facts.model, graphs, compiled
    if key not in store.runners:
        store.runners[key] = runner_of(facts, store.pool, graphs=graphs, compiled=compiled)
    return Engine(store.runners[key], store, settings, state_for_runner(facts))
