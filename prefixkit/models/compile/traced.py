"""A layer's cache that torch.compile can trace: only tensors and the calls of two ops."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixkit.attention.variants import Variant, lookup, register
from prefixkit.attention.visible import Visible
from prefixkit.models.layer import Layer
from prefixkit.models.steps.layer_pages import LayerPages
from prefixkit.models.steps.traced_step import TracedStep
from prefixkit.models.variants.layer_scores import register_variant
from prefixkit.torch_private import mark_dynamic


class TracedLayer(Layer):
    """The cache of a layer that is traced, instead of a :class:`CacheLayer`."""

    def __init__(self, own: LayerPages, step: TracedStep) -> None:
        super().__init__(own, step)
        # Keys are strings: torch makes no constants of other objects.
        self.users = (None,) if own.kind.variant is None else tuple(map(register, own.kind.variant.parts))
        self._masked = step.place_under_mask(own)
        for pages in own.pages:  # graphs are made for pools of any size
            mark_dynamic(pages, [0, 1])

    @property
    def plan_under_mask(self) -> list[Tensor]:
        """The same, but made by :class:`TracedStep` before any layer runs."""
        assert isinstance(self.step, TracedStep), "as it was made"
        return self.plan if self._masked is None else self.step.masked[self._masked]

    def variants(self, cap: float | None, sinks: bool, bias: Variant | None = None) -> tuple[str, ...]:
        """The same, as constants of the graph; classes with a bias are not compiled."""
        visible = self.own.kind.visible  # passed as numbers: torch makes no constants of dataclasses
        first, *others = self.users
        keys = [_variant(visible.window, visible.chunk, cap, sinks, first)]
        keys += [_variant(visible.window, visible.chunk, cap, False, user) for user in others]
        return tuple(keys)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _variant(window: int | None, chunk: int | None, cap: float | None, sinks: bool, user: str | None) -> str:
    return register_variant(Visible(window, chunk), cap, sinks, None, None if user is None else lookup(user))
