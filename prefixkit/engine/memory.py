"""How large the KV pool is: what the requests need, within the memory that is left beside what a step takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prefixkit.attention.capacity import MOST_PARTIAL_BYTES
from prefixkit.engine.policy import parse_size
from prefixkit.engine.request import BeamParams, Request
from prefixkit.engine.scheduler import admission_order, pages_per_unit
from prefixkit.ops.kv_pool import KVSpec, free_memory
from prefixkit.tree.pages import check_page_size, pages_for
from prefixkit.tree.tokens import common_prefix

log = logging.getLogger("prefixkit")

# Of the memory that is free, without kv_budget: on the CPU, where other processes need some too; and on a GPU, of what
# steps leave.
FREE_MEMORY_SHARE = 0.5
GPU_MEMORY_SHARE = 0.95
# Samples that run at once: more make steps longer, not more tokens a second, and their logits take half a megabyte
# each.
MOST_RUNNING = 4096
# Where there is memory, beams get so many times the pages that they need at least: forks leave half of the slots free.
_BEAMS_PAGES = 2


def pool_pages(
    requests: Sequence[Request],
    spec: KVSpec,
    kv_budget: float | str | None,
    page_size: int,
    workspace: int = 0,
    free: int | None = None,
) -> int:
    """How many pages to make: what all requests need at once, within the budget.

    Args:
        requests: What will be asked.
        spec: What a token takes.
        kv_budget: KV to hold at most, see :func:`parse_size`; None takes a share of the memory that is free.
        page_size: Tokens per page.
        workspace: Bytes of that memory that steps need besides, on a GPU; see :func:`step_bytes`.
        free: Bytes that are free on the device; None: :func:`free_memory` of it.

    Raises:
        ValueError: ``kv_budget``, or what is free, is no positive number of bytes that holds a page, or there are no
            pages of this size.
    """
    check_page_size(page_size)
    budget = _free_for_kv(spec.device, workspace, free) if kv_budget is None else parse_size(kv_budget)
    need = pages_needed(requests, page_size)
    pages = min(need, _pages_in(budget, spec, kv_budget, page_size, workspace))
    if pages < need:
        log.info("KV pool: %d of the %d pages that all requests need at once; the rest waits", pages, need)
    return max(pages, 1)


def session_pages(spec: KVSpec, kv_budget: float | str | None, page_size: int, free: int | None = None) -> int:
    """Pages of a pool that outlives its requests: what the budget holds; without one, half of the memory that is free.

    Raises:
        ValueError: see :func:`pool_pages`.
    """
    check_page_size(page_size)
    free = free_memory(spec.device) if free is None else free
    budget = int(free * FREE_MEMORY_SHARE) if kv_budget is None else parse_size(kv_budget)
    return _pages_in(budget, spec, kv_budget, page_size)


def _pages_in(budget: int, spec: KVSpec, kv_budget: float | str | None, page_size: int, workspace: int = 0) -> int:
    """Pages that so many bytes hold, at least one."""
    page_bytes = page_size * spec.bytes_per_token
    if budget >= page_bytes:
        return budget // page_bytes
    page = f"a page of {page_size} tokens takes {page_bytes} bytes ({page_bytes / 2**20:.2f} MiB)"
    if kv_budget is not None:
        raise ValueError(f"kv_budget={budget} bytes holds no page; {page}; raise kv_budget")
    raise ValueError(
        f"the memory left for KV ({budget} bytes) holds no page; {page}, "
        f"and a step {workspace / 2**20:.0f} MiB besides; "
        "free some memory, ask for fewer samples, or lower prefill_chunk"
    )


def pages_needed(requests: Sequence[Request], page_size: int, most_running: int = MOST_RUNNING) -> int:
    """Pages of all requests at once at most, what they share counted once, while so many samples run at a time."""
    prompts = samples = units = largest = 0
    before = np.empty(0, np.int32)
    for request in admission_order(
        requests
    ):  # what a prompt shares with any before it, it shares with the last of them
        prompts += pages_for(len(request.tokens) - common_prefix(before, request.tokens), page_size)
        unit, count = pages_per_unit(request.params, page_size), len(request.sample_indices)
        unit *= _BEAMS_PAGES if isinstance(request.params, BeamParams) else 1
        samples, units, largest = samples + count * unit, units + count, max(largest, unit)
        before = request.tokens
    return prompts + (samples if units <= most_running else min(samples, most_running * largest))


def step_bytes(config: Any, spec: KVSpec, requests: Sequence[Request], prefill_chunk: int) -> int:
    """Bytes that the largest step may take besides weights and KV, from above: activations, logits, partial states.

    Args:
        config: The model's text config.
        spec: For the dtype.
        requests: Their samples run at once, up to ``MOST_RUNNING``.
        prefill_chunk: Prompt tokens of a step.
    """
    samples = min(MOST_RUNNING, sum(_rows(request) for request in requests))
    hidden = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    heads = int(config.num_attention_heads) * spec.head_dim
    size = spec.dtype.itemsize
    # Of a layer: residual, norm, queries, keys and values, output; gate, up and their product.
    activations = (prefill_chunk + samples) * size * (4 * hidden + 4 * heads + 3 * inner)
    # As computed, in float32, and those from which first tokens are sampled; a graph's are its own.
    logits = samples * int(config.vocab_size) * (2 * (size + 4) + 4)
    # Partial states of one attention call, which torch gets back when it returns, and of one in the graphs' memory.
    return activations + logits + 2 * MOST_PARTIAL_BYTES


def _free_for_kv(device: torch.device, workspace: int, free: int | None) -> int:
    free = free_memory(device) if free is None else free
    if device.type != "cuda":
        return int(free * FREE_MEMORY_SHARE)
    return max(0, int(free * GPU_MEMORY_SHARE) - workspace)


def _rows(request: Request) -> int:
    return request.params.num_beams if isinstance(request.params, BeamParams) else len(request.sample_indices)
