"""The dtype in which pages hold K and V of a patched model: the model's own, or e4m3.

e4m3 has 4 significant bits for all magnitudes between 2^-6 and 448, so a scale would only move that range: K and V are
rounded without a scale, each number by the same rule, and what is cached of a token depends on that token's K and V
alone, not on other tokens of a page or a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.ops.arguments import FP8

KVDtype = Literal["fp8"]
KV_DTYPES: dict[str, torch.dtype] = {"fp8": FP8}
# The attribute of patched attention modules whose K and V are rounded: bits per number, which calls compare.
KV_BITS = "_prefixkit_kv_bits"


def check_kv_dtype(given: object) -> None:
    """Raise ValueError unless ``given`` is a :data:`KVDtype` or None."""
    if given is not None and given not in KV_DTYPES:
        raise ValueError(
            f"kv_dtype must be {' or '.join(map(repr, KV_DTYPES))}, or None for the model's own dtype; got {given!r}"
        )


def set_kv_dtype(modules: Iterable[nn.Module], given: KVDtype | None) -> bool:
    """Let attention modules cache K and V in this dtype from now on; returns whether that changes their dtype."""
    changed = False
    for module in modules:
        before = module.__dict__.pop(KV_BITS, None)
        if given is not None:
            module.__dict__[KV_BITS] = 8 * KV_DTYPES[given].itemsize
        changed |= before != module.__dict__.get(KV_BITS)
    return changed


def kv_dtype_of(modules: Iterable[nn.Module]) -> KVDtype | None:
    """The dtype that :func:`set_kv_dtype` has set for modules."""
    return "fp8" if any(KV_BITS in module.__dict__ for module in modules) else None


def with_kv_dtype(kinds: Sequence[LayerKind], given: KVDtype | None, name: str) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers if pages held their K and V in this dtype.

    Raises:
        UnsupportedModel: a layer caches tensors other than K and V, which cannot be rounded.
    """
    if given is None:
        return tuple(kinds)
    for kind in kinds:
        others = {
            "latents": kind.expands,
            "keys of an indexer": kind.index_dtype is not None,
            "compressed tokens": bool(kind.compressed),
        }
        if found := [what for what, here in others.items() if here]:
            raise UnsupportedModel(
                f"kv_dtype={given!r} rounds K and V, and layers of {name} cache {' and '.join(found)}; patch it without"
            )
    return tuple(replace(kind, stored=KV_DTYPES[given]) for kind in kinds)
