"""A layer's cache as torch.compile traces it: nothing but tensors and the calls of two ops."""

from __future__ import annotations

import torch

from prefixkit.attention.variants import Variant, lookup, register
from prefixkit.attention.visible import Visible
from prefixkit.models.layer import Layer, TracedStep
from prefixkit.models.layer_pages import LayerPages
from prefixkit.models.variants.layer_scores import register_variant
from prefixkit.torch_private import mark_dynamic


class TracedLayer(Layer):
    """The cache of a layer that is traced, in place of a :class:`CacheLayer`."""

    def __init__(self, own: LayerPages, step: TracedStep) -> None:
        super().__init__(own, step)
        # A string: torch makes no constants of other objects.
        self.user = None if own.kind.variant is None else register(own.kind.variant)
        for pages in own.pages:  # graphs are made for pools of any size
            mark_dynamic(pages, [0, 1])

    def variant(self, cap: float | None, sinks: bool, bias: Variant | None = None) -> str:
        """The same, as a constant of the graph; classes with a bias are not compiled."""
        visible = self.own.kind.visible  # its numbers: torch makes no constants of dataclasses
        key: str = _variant(visible.window, visible.chunk, cap, sinks, self.user)
        return key


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _variant(window: int | None, chunk: int | None, cap: float | None, sinks: bool, user: str | None) -> str:
    return register_variant(Visible(window, chunk), cap, sinks, None, None if user is None else lookup(user))
