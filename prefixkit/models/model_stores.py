"""The KV stores of a patched model, and what their KV is of."""

from __future__ import annotations

from typing import Any

from prefixkit.kv.stores import ModelStores, StoreKind
from prefixkit.models.facts import ModelFacts
from prefixkit.models.tensor_parallel import agreement_of

_STORES = "_prefixkit_stores"


def stores_of(model: Any) -> ModelStores:
    """Those of a transformers model, which keeps them from its first call on; :func:`drop_stores` ends that."""
    stores: ModelStores = model.__dict__.setdefault(_STORES, ModelStores())
    stores.agreement = agreement_of(model)
    return stores


def drop_stores(model: Any, *, all_traces: bool = False) -> None:
    """Free the KV that rests with a model; later calls use none of before.

    ``all_traces``: the model is to hold nothing, and the stores that sessions hold are no longer shared.
    """
    stores: ModelStores | None = model.__dict__.get(_STORES)
    if stores is not None:
        stores.drop()
    if all_traces:
        model.__dict__.pop(_STORES, None)


def kind_of(facts: ModelFacts, page_size: int = 16, eviction: str = "lru", compiled: bool = False) -> StoreKind:
    """What the KV of a call has to have in common with that of others; ``compiled`` steps are such on a GPU alone."""
    compiles = compiled and facts.spec.device.type == "cuda"
    return StoreKind(
        facts.spec, facts.layers, page_size, eviction, compiles, facts.outer, facts.looks_ahead, facts.held
    )
