"""How many pages requests and their runs need."""

from __future__ import annotations

from collections.abc import Iterable

from prefixkit.engine.request import BeamParams, Request
from prefixkit.kv.budget import Budget
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree.pages import pages_for


def pages_per_run(params: SamplingParams | BeamParams, page_size: int) -> int:
    """Pages that one sample, or one beam search, needs beyond its prompt to run to its end.

    The last token sampled needs no KV.  Beams fork at any token, and each fork may start a fresh page; but a search
    that runs out of pages is preempted, and each of its beams comes back on pages that are full but for the last.
    Beside them it then needs pages for the tokens that join the tree at once, and for the next ones.
    """
    tokens = params.max_new_tokens - 1
    pages = pages_for(tokens, page_size)
    return params.sequences_per_run * (min(tokens, pages + 2) if params.forks else pages)


def lookahead_pages(params: SamplingParams | BeamParams, page_size: int, tokens: int) -> int:
    """Pages that a sample, or a search, may take with the next ``tokens`` tokens of each sequence."""
    return params.sequences_per_run * pages_for(min(params.max_new_tokens - 1, tokens), page_size)


def check_fits(requests: Iterable[Request], budget: Budget) -> None:
    """Raise KVBudgetTooSmall, before anything starts, if some request cannot run to its end even alone."""
    for request in requests:
        if pages := budget.pages_lacking(request.tokens, pages_per_run(request.params, budget.tree.page_size)):
            what = f"{len(request.tokens)} prompt tokens, max_new_tokens={request.params.max_new_tokens}"
            one = f"one sequence of prompt {request.prompt_index} ({what})"
            raise budget.error(one, pages, "lower max_new_tokens" + " or num_beams" * request.params.forks)
