"""What requests need of memory: pages of KV, and bytes of a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from prefixkit.attention.gpu.capacity import MOST_PARTIAL_BYTES
from prefixkit.engine.page_needs import pages_per_run
from prefixkit.engine.request import Request
from prefixkit.engine.waiting_queue import admission_order
from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.limits import call_pages
from prefixkit.tree.pages import pages_for
from prefixkit.tree.tokens import common_prefix

log = logging.getLogger("prefixkit")

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
    free: int,
    workspace: int = 0,
) -> int:
    """How many pages to make: what all requests need at once, within the budget.

    Args:
        requests: What will be asked.
        spec, kv_budget, page_size, free, workspace: See :func:`call_pages`; for the workspace, :func:`step_bytes`.

    Raises:
        ValueError: see :func:`call_pages`.
    """
    most = call_pages(spec, kv_budget, page_size, free, workspace)
    need = pages_needed(requests, page_size)
    if most < need:
        log.info("KV pool: %d of the %d pages that all requests need at once; the rest waits", most, need)
    return max(1, min(need, most))


def pages_needed(requests: Sequence[Request], page_size: int, most_running: int = MOST_RUNNING) -> int:
    """Pages of all requests at once at most, what they share counted once, while so many samples run at a time."""
    prompts = samples = runs = largest = 0
    before = np.empty(0, np.int32)
    for request in admission_order(
        requests
    ):  # what a prompt shares with any before it, it shares with the last of them
        prompts += pages_for(len(request.tokens) - common_prefix(before, request.tokens), page_size)
        pages, count = pages_per_run(request.params, page_size), len(request.sample_indices)
        pages *= _BEAMS_PAGES if request.params.forks else 1
        samples, runs, largest = samples + count * pages, runs + count, max(largest, pages)
        before = request.tokens
    return prompts + (samples if runs <= most_running else min(samples, most_running * largest))


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


def _rows(request: Request) -> int:
    return len(request.sample_indices) * request.params.sequences_per_run
