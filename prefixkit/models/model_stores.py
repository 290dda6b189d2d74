"""The KV stores of a patched model, and the settings that their KV depends on."""

from __future__ import annotations

from typing import Any

from prefixkit.kv.stores import ModelStores, StoreKind
from prefixkit.models.facts import ModelFacts
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.tensor_parallel import agreement_of

_STORES = "_prefixkit_stores"


def stores_of(model: Any) -> ModelStores:
    """The stores of a transformers model, which holds them from its first call until :func:`drop_stores`."""
    stores: ModelStores = model.__dict__.setdefault(_STORES, ModelStores())
    stores.agreement = agreement_of(model)
    return stores


def drop_stores(model: Any, *, all_traces: bool = False) -> None:
    """Free the KV that a model retains between calls; later calls use no KV from before.

    ``all_traces``: the model also drops its stores, so that stores held by sessions are no longer shared.
    """
    stores: ModelStores | None = model.__dict__.get(_STORES)
    if stores is not None:
        stores.drop()
    if all_traces:
        model.__dict__.pop(_STORES, None)


def kind_of(facts: ModelFacts, page_size: int = 16, eviction: str = "lru", compiled: bool = False) -> StoreKind:
    """The settings that calls must have in common to share KV; ``compiled`` has an effect on a GPU alone.

    Raises:
        UnsupportedModel: the model is on a device of another type than cpu and cuda, or has no weights yet (meta).
    """
    if (device := facts.spec.device.type) not in ("cpu", "cuda"):
        raise UnsupportedModel(
            f"{type(facts.inner).__name__} is on {device}, and prefixkit runs models on a CPU or on NVIDIA GPUs; "
            "load its weights, or move it by model.to('cpu') or model.to('cuda')"
        )
    compiles = compiled and facts.spec.device.type == "cuda"
    layers = facts.layers, facts.probed.computed_by, facts.probed.state_calls
    return StoreKind(facts.spec, layers, page_size, eviction, compiles, facts.outer, facts.looks_ahead, facts.held)
