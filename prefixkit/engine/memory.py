"""How much memory requests need: pages of KV, and bytes of a step."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from prefixkit.attention.gpu.capacity import MOST_PARTIAL_BYTES
from prefixkit.engine.request import BeamParams, Request
from prefixkit.engine.request_state import admission_order
from prefixkit.kv.budget import Budget
from prefixkit.kv.held import Held
from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.limits import call_pages
from prefixkit.kv.store import KVStore
from prefixkit.runners.short_steps import ROWS, most_short_rows
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree.pages import pages_for
from prefixkit.tree.tokens import common_prefix

log = logging.getLogger("prefixkit")

# Most samples that run at once: more make steps longer without more tokens per second, and the logits of each take
# half a megabyte.
MOST_RUNNING = 4096
# States that a prompt in flight holds: at its end, before its last token, where it forks from others, and a spare one.
STATES_PER_PROMPT = 4
# Where memory allows it, beams get this multiple of the pages that they need at least, because forks leave half of the
# slots free.
_BEAMS_PAGES = 2


def pool_pages(
    requests: Sequence[Request],
    spec: KVSpec,
    kv_budget: float | str | None,
    page_size: int,
    free: int,
    workspace: int = 0,
    held: Held | None = None,
) -> int:
    """How many pages to allocate: those that all requests need at once, within what :func:`call_pages` allows.

    Raises:
        ValueError: see :func:`call_pages`.
    """
    most = call_pages(spec, kv_budget, page_size, free, workspace)
    need = pages_needed(requests, page_size, held=held)
    if most < need:
        log.info("KV pool: %d of the %d pages that all requests need at once; the rest waits", most, need)
    return max(1, min(need, most))


def pages_needed(
    requests: Sequence[Request], page_size: int, most_running: int = MOST_RUNNING, held: Held | None = None
) -> int:
    """Most pages that all requests hold while ``most_running`` samples run at a time; shared pages count once."""
    prompts = samples = runs = largest = 0
    before = np.empty(0, np.int32)
    # In this order, the longest prefix that a prompt shares with an earlier one is shared with the one before it.
    for request in admission_order(requests):
        prompts += pages_for(len(request.tokens) - common_prefix(before, request.tokens), page_size)
        pages, count = pages_per_run(request.params, page_size, held), len(request.sample_indices)
        pages *= _BEAMS_PAGES if request.params.forks else 1
        samples, runs, largest = samples + count * pages, runs + count, max(largest, pages)
        before = request.tokens
    return prompts + (samples if runs <= most_running else min(samples, most_running * largest))


def step_bytes(config: Any, spec: KVSpec, requests: Sequence[Request], prefill_chunk: int) -> int:
    """An upper bound of the bytes of the largest step besides weights and KV: activations, logits, partial states.

    ``config`` is the model's text config.  The largest step runs all samples, up to ``MOST_RUNNING``, and
    ``prefill_chunk`` prompt tokens.
    """
    rows = sum(len(request.sample_indices) * request.params.sequences_per_run for request in requests)
    samples = min(MOST_RUNNING, rows)
    hidden = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    widest = max(tensor.head_dim for cached in spec.layers for tensor in cached)
    heads = max(int(layer.num_attention_heads) for layer in _layer_configs(config)) * widest
    size = spec.compute_dtype.itemsize
    # Graphs of short steps have activations of their own, for a bucket of rows.  Layers with few weights run more rows:
    # these have at least the weights of queries and outputs, and two of the MLP.
    bucket = ROWS[min(bisect_left(ROWS, prefill_chunk + samples), len(ROWS) - 1)]
    short = min(bucket, most_short_rows(1, hidden * 2 * (heads + inner)))
    # One layer: residual, norm, queries, keys and values, output; gate, up and their product.
    activations = (prefill_chunk + samples + short) * size * (4 * hidden + 4 * heads + 3 * inner)
    # Logits as computed, in float32, and those from which first tokens are sampled; a graph has logits of its own.
    logits = samples * int(config.vocab_size) * (2 * (size + 4) + 4)
    # Partial states of one eager attention call, freed when it returns, and of one in the memory of the graphs.
    return activations + logits + 2 * MOST_PARTIAL_BYTES


def _layer_configs(config: Any) -> list[Any]:
    """The config of each layer, if the model has one config per layer; else the model's config alone."""
    if not getattr(config, "per_layer_attributes", None):
        return [config]
    return [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]


def pages_per_run(params: SamplingParams | BeamParams, page_size: int, held: Held | None = None) -> int:
    """Pages that one sample, or one beam search, needs beyond its prompt to run to its end.

    The last token sampled needs no KV.  Beams fork at any token, and each fork may start a fresh page; but a search
    that runs out of pages is preempted, and when it resumes, all pages of each beam but the last are full.  The search
    then also needs pages for the tokens that it appends to the tree on resuming, and for the next tokens.  A
    sample releases all KV but what ``held`` retains.
    """
    tokens = params.max_new_tokens - 1
    pages = _grown(tokens, page_size, held)
    return params.sequences_per_run * (min(tokens, pages + 2) if params.forks else pages)


def states_per_run(params: SamplingParams | BeamParams) -> int:
    """States that a run holds at once, in layers that keep a state; beams hold those before and after a step."""
    return params.sequences_per_run * (3 if params.forks else 1)


def have_states(store: KVStore, requests: Sequence[Request], most_running: int) -> None:
    """Allocate slots for the states of these requests, or of as many of their runs as memory allows.

    Raises:
        KVBudgetTooSmall: some request cannot run even alone.
    """
    each = [states_per_run(request.params) for request in requests]
    runs = sum(len(request.sample_indices) * states for request, states in zip(requests, each, strict=True))
    largest = max(each, default=1)
    checkpoints = sum(len(request.tokens) for request in requests) // store.tokens_per_checkpoint
    wanted = checkpoints + STATES_PER_PROMPT * len(requests) + min(runs, most_running * largest)
    remedy = "lower num_beams" if any(request.params.forks for request in requests) else ""
    store.have_slots(wanted + STATES_PER_PROMPT, 2 * STATES_PER_PROMPT + largest, remedy)


def lookahead_pages(params: SamplingParams | BeamParams, page_size: int, tokens: int, held: Held | None = None) -> int:
    """Pages that a sample, or a search, may take with the next ``tokens`` tokens of each sequence."""
    return params.sequences_per_run * _grown(min(params.max_new_tokens - 1, tokens), page_size, held)


def _grown(tokens: int, page_size: int, held: Held | None) -> int:
    """Pages of ``tokens`` tokens after a prompt, or of those of them whose KV is held."""
    pages = pages_for(tokens, page_size)
    return pages if held is None else min(pages, held.most_pages(page_size))


def check_fits(requests: Iterable[Request], budget: Budget) -> None:
    """Raise KVBudgetTooSmall, before any request starts, if some request cannot run to its end even alone, and
    ValueError for a beam search in a store whose samples release KV.
    """
    size, held = budget.tree.page_size, budget.held
    for request in requests:
        if held is not None and request.params.forks:
            raise ValueError(
                "beam search: the model attends at positions in the cache (variants.streaming_llm), and KV that leaves "
                "the window is given back, while beams fork from one another; sample, patch the model with "
                "variants.streaming, or call model.generate(num_beams=...), which holds all KV"
            )
        if pages := budget.pages_lacking(request.tokens, pages_per_run(request.params, size, held)):
            what = f"{len(request.tokens)} prompt tokens, max_new_tokens={request.params.max_new_tokens}"
            one = f"one sequence of prompt {request.prompt_index} ({what})"
            one_token = request.params.max_new_tokens == 1 and not request.params.forks  # as of a pin
            lower = (
                "shorten the prompt" if one_token else "lower max_new_tokens" + " or num_beams" * request.params.forks
            )
            raise budget.error(one, pages, lower)
