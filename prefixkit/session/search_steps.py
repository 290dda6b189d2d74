"""Steps of search nodes: their requests, and the sampled tokens that are appended to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prefixkit.engine.request import BeamParams, Request, Sample
from prefixkit.models import ModelFacts
from prefixkit.sampling.params import SamplingFields, SamplingParams, StopFunction, as_stops
from prefixkit.session.requests import checked_requests, params_of_each
from prefixkit.session.search import NodeFinished, SearchNode

Params = SamplingParams | BeamParams
Until = str | StopFunction | Iterable[str | StopFunction]


def step_requests(
    facts: ModelFacts,
    tokenizer: Any,
    nodes: list[SearchNode],
    params: Params | Sequence[Params] | None,
    until: Until | None,
    fields: SamplingFields,
) -> list[Request]:
    """The requests of :meth:`prefixkit.Session.step`: one for each node, with its seed.

    Raises:
        ValueError, TypeError: as :meth:`prefixkit.Session.step`.
    """
    if not nodes:
        raise ValueError("nodes is empty; pass at least one search node")
    if len({id(node) for node in nodes}) < len(nodes):
        raise ValueError("a node is listed twice; fork it to go on in two ways")
    for node in nodes:
        if node.finish_reason == "stop":
            raise NodeFinished(
                f"{node!r} ended with the stop token {node.tokens[-1]}; extend it, fork its parent, or leave it out; "
                "a string given as until= ends a step, not the node"
            )
    kinds, how = (SamplingParams, BeamParams), "one for all nodes or one for each"
    each = params_of_each(kinds, facts, params, fields, len(nodes), how, "nodes")
    stop = () if until is None else as_stops("until", until)
    rows = enumerate(zip(nodes, each, strict=True))
    requests = [Request(index, node.ids(), _of_node(node, own, stop)) for index, (node, own) in rows]
    return [_placed(*row) for row in zip(nodes, checked_requests(facts, tokenizer, requests), strict=True)]


def append_samples(nodes: list[SearchNode], requests: list[Request], samples: Iterable[Sample]) -> list[SearchNode]:
    """Append sampled tokens to the nodes; children replace a node whose search returns several sequences."""
    found: list[list[Sample]] = [[] for _ in nodes]
    for sample in samples:
        found[sample.prompt_index].append(sample)
    return [grown for row in zip(nodes, requests, found, strict=True) for grown in _grown(*row)]


def _placed(node: SearchNode, request: Request) -> Request:
    """The request with the matcher at the node's end."""
    grammar, begin = getattr(request.params, "grammar", None), request.matcher
    if grammar is None or begin is None:
        return request
    return replace(request, matcher=node.place_in(grammar, begin))


def _of_node(node: SearchNode, params: Params, until: tuple[str | StopFunction, ...]) -> Params:
    """Parameters with the node's seed, and with ``until`` added to ``stop``."""
    if isinstance(params, BeamParams):
        if until:
            raise ValueError(
                "until ends samples, and a beam search has none of its strings; give SamplingParams(stop=...) to the "
                "nodes that sample, and stop_token_ids to the beams"
            )
        return params
    if params.n != 1:
        raise ValueError(f"a node goes on in one way, got n={params.n}; fork it {params.n} times and step the forks")
    if params.seed != 0:
        raise ValueError(f"a node samples by its own seed, got seed={params.seed}; fork(count, seeds=[...]) sets it")
    return replace(params, seed=node.seed, stop=(*params.stop, *until))


def _grown(node: SearchNode, request: Request, samples: list[Sample]) -> list[SearchNode]:
    """The node with the tokens of its sample, or its children with those of the several sequences of its search."""
    params = request.params
    several = isinstance(params, BeamParams) and params.num_return_sequences > 1
    grown = node.fork(len(samples)) if several else [node]
    for one, sample in zip(grown, samples, strict=True):
        if isinstance(params, SamplingParams) and params.grammar is not None and request.matcher is not None:
            one.remember_place(params.grammar, request.matcher)
        tokens, logprobs = np.array(sample.tokens, np.int32), np.array(sample.logprobs, np.float32)
        by_token = bool(sample.tokens) and sample.tokens[-1] in (params.stop_token_ids or ())
        until = sample.finish_reason == "stop" and not by_token
        one.append(tokens, logprobs, "until" if until else sample.finish_reason)
    return grown
