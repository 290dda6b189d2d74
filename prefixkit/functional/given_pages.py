"""K and V in the caller's own tensors, in the layouts of FlashInfer's paged caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.layer_kinds import CachedTensor
from prefixkit.tree.pages import check_page_size


@dataclass(frozen=True, eq=False)
class GivenPages:
    """The caller's pages, read and written in place, instead of a ``KVPool``.

    Attributes:
        layers: For each layer K and V, ``[pages, page_size, kv_heads, head_dim]`` each, in one dtype.
        spec: The tensors that are cached for one token.
    """

    layers: Sequence[tuple[Tensor, Tensor]]
    spec: KVSpec

    def __repr__(self) -> str:
        return f"GivenPages({self.num_pages} pages of {self.page_size} tokens, {self.spec})"

    @property
    def num_pages(self) -> int:
        """The number of pages, the same in each layer."""
        return self.layers[0][0].shape[0]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.layers[0][0].shape[1]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """``[pages, page_size, kv_heads, head_dim]`` K and V of a layer; IndexError if there is no such layer."""
        if not 0 <= layer < len(self.layers):
            raise IndexError(f"GivenPages: layer {layer} of pages for layers 0..{len(self.layers) - 1}")
        return self.layers[layer]


def kv_pool_from_tensors(
    paged_kv_cache: Sequence[Tensor | tuple[Tensor, Tensor]], kv_layout: str = "NHD"
) -> GivenPages:
    """Make a pool over the caller's own caches; nothing is copied.

    Args:
        paged_kv_cache: For each layer one tensor ``[pages, 2, page_size, kv_heads, head_dim]``, K before V; or a pair
            of K and V, each without the dimension of 2.  In ``kv_layout`` "HND" kv_heads come before page_size.  On a
            CPU only pairs in "NHD" are supported.  All tensors have one dtype: float32, bfloat16 or float16.
        kv_layout: "NHD" or "HND".

    Raises:
        ValueError: there is no layer, layers differ, or the tensors have other shapes or dtypes.
    """
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f'kv_pool_from_tensors: kv_layout must be "NHD" or "HND", got {kv_layout!r}')
    layers = []
    for number, cache in enumerate(paged_kv_cache):
        if isinstance(cache, Tensor) and (cache.ndim != 5 or cache.shape[1] != 2):
            raise ValueError(
                f"kv_pool_from_tensors: layer {number} must have shape [pages, 2, page_size, kv_heads, head_dim], or "
                f"with kv_heads before page_size, got {list(cache.shape)}"
            )
        pair = cache.unbind(1) if isinstance(cache, Tensor) else cache
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(each, Tensor) for each in pair):
            raise ValueError(
                f"kv_pool_from_tensors: layer {number} must be one tensor, or K and V, got {type(cache).__name__}"
            )
        k, v = pair
        layers.append((k.transpose(1, 2), v.transpose(1, 2)) if kv_layout == "HND" else (k, v))
    found = {(k.shape, v.shape, k.dtype, v.dtype, k.device, v.device) for k, v in layers}
    if len(found) != 1:
        raise ValueError(f"kv_pool_from_tensors: all layers must have one shape, dtype and device, got {len(found)}")
    (k, v), *_ = layers
    if k.ndim != 4 or k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"kv_pool_from_tensors: K and V must be alike except for head_dim, got {list(k.shape)} {k.dtype} on "
            f"{k.device} and {list(v.shape)} {v.dtype} on {v.device}"
        )
    check_page_size(k.shape[1])
    cached = CachedTensor(k.shape[2], k.shape[3]), CachedTensor(v.shape[2], v.shape[3])
    return GivenPages(layers, KVSpec((cached,) * len(layers), k.dtype, k.device))
