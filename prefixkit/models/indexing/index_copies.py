"""Copies index keys of a tree cache to caches of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prefixkit.kv.kv_pool import KVPool
from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.models.indexing.index_keys import index_keys_at
from prefixkit.tree.rows import Rows


def index_dtypes(kinds: Sequence[LayerKind]) -> dict[int, torch.dtype]:
    """The dtype of the index keys of each layer that caches index keys, by layer number."""
    found = {layer: kind.index_dtype for layer, kind in enumerate(kind for kind in kinds if kind.cached)}
    return {layer: dtype for layer, dtype in found.items() if dtype is not None}


def copy_index_keys(dtypes: dict[int, torch.dtype], pool: KVPool, rows: Rows, cache: Any) -> None:
    """Copy the index keys of rows from a pool to a cache of transformers; padding gets zeros."""
    slots, padding = torch.from_numpy(rows.slots()), torch.from_numpy(np.arange(rows.length) < rows.pad[:, None])
    for layer, dtype in dtypes.items():
        pages = pool.pages(layer)[-1]
        keys = index_keys_at(pages, slots.to(pages.device), dtype)
        cache.update_indexer(keys.masked_fill_(padding.to(keys.device)[..., None], 0), layer)
