"""The runner of a patched model's steps, eager or with CUDA graphs, with a planner for each kind of its layers."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from prefixkit.attention.planner import Planner
from prefixkit.kv.kv_pool import KVPool
from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.models.compile.packed_weights import moves
from prefixkit.models.experts import log_experts
from prefixkit.models.facts import ModelFacts
from prefixkit.models.states.fused_step import log_fused
from prefixkit.models.states.norms import log_norms
from prefixkit.models.steps.runner import ModelRunner
from prefixkit.models.tensor_parallel import agreement_of
from prefixkit.models.weights.state import ModelState, weights_places
from prefixkit.ops.backend import GraphPlanning, backend_for, graph_plannings, part_backend, plain_torch
from prefixkit.runners.eager import EagerRunner
from prefixkit.runners.graph import GraphRunner
from prefixkit.runners.short_steps import most_short_rows

log = logging.getLogger("prefixkit")


def planners_of(facts: ModelFacts) -> tuple[Planner, ...]:
    """The planners of attention, one for each kind of a model's layers."""
    spec, made = facts.spec, list[Planner]()
    counts = Counter(kind for layer in facts.layers for kind in layer.plan_kinds)
    for kind in facts.plan_kinds:
        backend = backend_for(kind.device)
        if kind.part is not None:
            planner_for = part_backend(kind.device, kind.part.part).planner_for
            made.append(planner_for(kind.part, kind.device, spec.dtype, counts[kind]))
            continue
        if kind.plain and backend.name != "torch":
            backend = plain_torch()
        made.append(backend.planner_for(kind.shape, kind.device, spec.compute_dtype, kind.visible))
    return tuple(made)


def plannings_of(facts: ModelFacts, planners: Sequence[Planner]) -> list[GraphPlanning] | None:
    """How decode steps of these planners are planned in CUDA graphs; None if steps of the model run without graphs."""
    device = facts.spec.device
    return None if device.type != "cuda" or facts.is_spread else graph_plannings(device, planners)


def _log_plain(layers: Sequence[LayerKind]) -> None:
    """Log for which layers attention runs in plain torch on a GPU, and why."""
    reasons = {
        "over latents": (
            "K and V are not linear in them, or layers see a part",
            any(kind.expands and not kind.absorbs for kind in layers),
        ),
        "to tokens that indexers select": (
            "no kernel reads some tokens of a text",
            any(kind.selects is not None for kind in layers),
        ),
        "with a bias of each query": ("no kernel adds one", any(kind.biased for kind in layers)),
        "to compressed tokens": ("no kernel compresses them", any(kind.compressed for kind in layers)),
    }
    for what, (why, here) in reasons.items():
        if here:
            log.info("attention %s runs in plain torch: %s", what, why)


def short_rows(facts: ModelFacts) -> int:
    """Most query rows of steps other than decode steps that CUDA graphs may run; 0: they run none.

    Plans of attention over latents are made for decode steps, and variants of the user's may read sequence numbers,
    classes of blocks or later tokens, for which these graphs have no buffers.
    """
    whole = all(kind.part is None and kind.visible.until is None for kind in facts.plan_kinds)
    if not whole or any(layer.variant is not None for layer in facts.layers):
        return 0
    head = facts.inner.get_output_embeddings()  # type: ignore[no-untyped-call]
    parts = [one for one in facts.state.modules if one is not head and not isinstance(one, nn.Embedding)]
    weights = sum(map(_products, parts))
    return most_short_rows(len(facts.layers) + len(facts.mixers), max(1, weights))


def _products(module: nn.Module) -> int:
    """The numbers by which a module multiplies each row; weights of 4 bits may be packed, or lie in buffers."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if all(isinstance(size, int) for size in sizes):
        return math.prod(sizes)  # type: ignore[arg-type]
    return sum(weight.numel() for weight in module.parameters(recurse=False))


def state_for_runner(facts: ModelFacts) -> ModelState | None:
    """What the model computes with, as ``Runner.start_call`` takes it; None for a model within others, such as one with
    adapters, of which a runner looks at all modules.
    """
    return facts.state if facts.model is facts.inner else None


def runner_of(
    facts: ModelFacts,
    pool: KVPool,
    *,
    graphs: bool = True,
    compiled: bool = False,
    call: Callable[..., Any] | None = None,
) -> EagerRunner | GraphRunner:
    """The runner of a patched model's steps: decode steps run as CUDA graphs if possible; else it logs why not.

    Args:
        facts: The facts of the patched model.
        pool: The pool that holds its KV.
        graphs: Whether to use CUDA graphs.
        compiled: Whether layers in these graphs run through torch.compile, and, once they are compiled, those of other
            steps too.
        call: See :class:`ModelRunner`.
    """
    model, spec, planners = facts.model, pool.spec, planners_of(facts)
    device = spec.device
    agreement = agreement_of(facts.inner)
    agreement.check(
        "measured costs of attention",
        lambda: [(planner.cost, getattr(planner, "gpu", None)) for planner in planners],
        "run prefixkit warmup on each of their machines, or let them share the cache folder",
    )
    log_experts(facts.state.modules, device, pool.spec.compute_dtype)
    log_fused(facts.state.modules, device)
    log_norms(facts.state.modules, device)
    plain = ModelRunner(model, pool, call=call, facts=facts)
    if device.type == "cuda":
        _log_plain(facts.layers)
    counts = Counter(kind for layer in facts.layers for kind in layer.plan_kinds)
    layer_counts = tuple(max(1, counts[kind]) for kind in facts.plan_kinds)
    if compiled and facts.spec.states:
        log.info("layers run without torch.compile: some of them keep a state in place of KV")
        compiled = False
    plannings = None
    if graphs and device.type == "cuda":
        plannings = plannings_of(facts, planners)
        if plannings is None:
            why = "attention does not run on kernels whose plans this GPU can make"
            why = "the model's weights lie on several devices" if facts.is_spread else why
            log.info("decoding without CUDA graphs: %s", why)
    if plannings is None:
        if compiled:
            log.warning("layers run without torch.compile: there are no CUDA graphs to compile them for")
        return EagerRunner(
            plain,
            planners,
            device,
            hidden=plain.hidden,
            layer_counts=layer_counts,
            agreement=agreement,
            plan_devices=tuple(kind.device for kind in facts.plan_kinds) if len(spec.shares) > 1 else (),
        )
    # torch would compile a separate graph for one row.
    steps, least_rows = (ModelRunner(model, pool, compiled=True, facts=facts), 2) if compiled else (plain, 1)
    through = steps if compiled else None
    eager = EagerRunner(
        plain,
        planners,
        device,
        hidden=plain.hidden,
        compiled=through,
        layer_counts=layer_counts,
        agreement=agreement,
    )
    # The sampler accepts the model's dtype: converting logits to float32 would copy them.
    return GraphRunner(
        eager,
        steps.compute,
        plannings,
        pool.page_size,
        least_rows=least_rows,
        weights=partial(weights_places, model),
        moves=moves,
        keep_states=bool(facts.spec.states),
        short=short_rows(facts) if agreement.processes == 1 else 0,
    )
