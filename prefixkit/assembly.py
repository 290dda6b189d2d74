"""From a patched model to an engine that samples from it: pool, tree, planner, and what decodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

import prefixkit.backends  # noqa: F401 - registers them
from prefixkit.attention.planner import Planner
from prefixkit.attention.sharing import HeadShape
from prefixkit.engine.engine import Engine
from prefixkit.engine.memory import MOST_RUNNING, pool_pages, prefill_chunk_for, step_bytes
from prefixkit.engine.request import Request
from prefixkit.models import ModelRunner, kv_spec, query_heads
from prefixkit.models.compile.packed_weights import moves
from prefixkit.ops.backend import backend_for
from prefixkit.ops.kv_pool import KVPool
from prefixkit.runners.decoder import Decoder
from prefixkit.runners.graph import GraphDecoder
from prefixkit.runners.sampler import sampler_of
from prefixkit.tree.radix import PrefixTree

log = logging.getLogger("prefixkit")


def make_engine(
    model: Any,
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
        model: The patched model.
        requests: What it will be asked.
        kv_budget, page_size, prefill_chunk: See :func:`generate`.
        graphs: Decode by CUDA graphs, where the GPU's kernels run the attention.
        compiled: Layers in these graphs go through torch.compile, which takes seconds, once for each model.
    """
    spec = kv_spec(model)
    chunk = prefill_chunk_for(spec.device) if prefill_chunk is None else prefill_chunk
    workspace = step_bytes(model.config.get_text_config(), spec, requests, chunk)
    num_pages = pool_pages(requests, spec, kv_budget, page_size, workspace)
    return engine_of(model, num_pages, page_size=page_size, prefill_chunk=chunk, graphs=graphs, compiled=compiled)


def engine_of(
    model: Any,
    num_pages: int,
    *,
    page_size: int = 16,
    prefill_chunk: int | None = None,
    graphs: bool = True,
    compiled: bool = False,
) -> Engine:
    """An engine over a patched model, with a pool of so many pages."""
    spec = kv_spec(model)
    chunk = prefill_chunk_for(spec.device) if prefill_chunk is None else prefill_chunk
    pool = KVPool(spec, num_pages, page_size)
    shape = HeadShape(query_heads(model), spec.kv_heads, spec.head_dim, spec.dtype.itemsize)
    tree = PrefixTree(num_pages, page_size)
    backend = backend_for(spec.device)
    planner, runner = backend.planner_for(shape, spec.device, spec.dtype), ModelRunner(model, pool)
    decoder = graph_decoder(runner, planner, page_size, spec.device) if graphs else None
    if compiled and decoder is None:
        log.warning("layers run without torch.compile: there are no CUDA graphs to compile them for")
    elif compiled:  # other graphs would have to be compiled for plans of prompts: some of their lists are empty
        decoder = graph_decoder(ModelRunner(model, pool, compiled=True), planner, page_size, spec.device)
    return Engine(
        runner,
        pool,
        tree,
        planner,
        prefill_chunk=chunk,
        decoder=decoder,
        sampler=sampler_of(spec.device),
        most_running=MOST_RUNNING,
    )


def graph_decoder(runner: ModelRunner, planner: Planner, page_size: int, device: torch.device) -> Decoder | None:
    """What decodes by CUDA graphs; None where that cannot be, with a line in the log if it is a GPU."""
    if device.type != "cuda":
        return None
    backend = backend_for(device)
    planning = None if backend.graph_planning is None else backend.graph_planning(planner)
    if planning is None:
        log.info("decoding without CUDA graphs: attention does not run on kernels whose plans this GPU can make")
        return None
    return GraphDecoder(runner.compute, planning, page_size, device, weights=runner.addresses, moves=moves)
