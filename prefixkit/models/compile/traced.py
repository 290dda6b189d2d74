"""A layer's cache as torch.compile traces it: nothing but tensors and the calls of two ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefixkit.attention.step import Step
from prefixkit.models.variants import register_variant


class TracedStep:
    """The tensors of the step in progress; inputs of the graphs, because they are read again at every call."""

    slots: Tensor
    positions: Tensor
    plan: list[Tensor]

    def load(self, step: Step) -> None:
        """Take a step's tensors."""
        self.slots, self.positions, self.plan = step.slots, step.positions, step.plan
        # A tree's and a plan's sizes change from step to step: graphs are made for any.
        for tensor in self.plan:
            if tensor.dtype == torch.int32:  # a handle has one element
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


class TracedLayer:
    """The cache of a layer that is traced, in place of a :class:`CacheLayer`.

    Attributes:
        k_pages, v_pages: The layer's pages.
        step: The step in progress, one object for all layers.
    """

    def __init__(self, k_pages: Tensor, v_pages: Tensor, step: TracedStep) -> None:
        self.k_pages = k_pages
        self.v_pages = v_pages
        self.step = step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the step's K and V, ``[1, kv_heads, T, head_dim]`` each, to the pages; returns them unchanged."""
        torch.ops.prefixkit.kv_append(
            key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), self.k_pages, self.v_pages, self.step.slots
        )
        return key_states, value_states

    def attend(
        self, query: Tensor, scale: float, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend over the tree: ``query [1, heads, T, head_dim]`` to ``[1, T, heads, head_dim]`` in the same dtype."""
        if sinks is not None:
            raise NotImplementedError("attention sinks are a variant of their own in each layer")
        step = self.step
        out: Tensor = torch.ops.prefixkit.tree_attention(
            query[0].transpose(0, 1),
            self.k_pages,
            self.v_pages,
            step.positions,
            step.plan,
            scale,
            _variant(window, cap),
        )[0]
        return out[None]

    def check_mask(self, attention_mask: Tensor | None) -> None:
        """Raise ValueError unless the mask is the empty one of ``TreeCache.inputs()``."""
        if attention_mask is None or attention_mask.numel():
            raise ValueError("a layer got a mask other than the empty one of TreeCache.inputs()")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _variant(window: int | None, cap: float | None) -> str:
    return register_variant(window, cap, None)
