"""A layer's cache as torch.compile traces it: nothing but tensors and the calls of two ops."""

from __future__ import annotations

import torch

from prefixkit.kv.kv_pool import KVPool
from prefixkit.models.layer import Layer, TracedStep, register_variant
from prefixkit.torch_private import mark_dynamic


class TracedLayer(Layer):
    """The cache of a layer that is traced, in place of a :class:`CacheLayer`."""

    def __init__(self, index: int, pool: KVPool, step: TracedStep, window: int | None) -> None:
        super().__init__(index, pool, step, window)
        for pages in (self.k_pages, self.v_pages):  # graphs are made for pools of any size
            mark_dynamic(pages, [0, 1])

    def variant(self, cap: float | None, sinks: bool) -> str:
        """The same, as a constant of the graph."""
        key: str = _variant(self.window, cap, sinks)
        return key


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _variant(window: int | None, cap: float | None, sinks: bool) -> str:
    return register_variant(window, cap, sinks)
