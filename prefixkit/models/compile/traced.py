"""A layer's cache as torch.compile traces it: nothing but tensors and the calls of two ops."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixkit.attention.step import Step
from prefixkit.models.layer import Layer, StepTensors, register_variant


class TracedStep(StepTensors):
    """The step in progress, one object for all layers: inputs of the graphs, read again at every call."""

    def load(self, step: Step) -> None:
        """Take a step's tensors."""
        self.slots, self.positions, self.plan = step.slots, step.positions, step.plan
        # A tree's and a plan's sizes change from step to step: graphs are made for any.
        for tensor in self.plan:
            if tensor.dtype == torch.int32:  # a handle has one element
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


class TracedLayer(Layer):
    """The cache of a layer that is traced, in place of a :class:`CacheLayer`."""

    def variant(self, window: int | None, cap: float | None, sinks: Tensor | None) -> str:
        """The same, as a constant of the graph."""
        if sinks is not None:
            raise NotImplementedError("attention sinks are a variant of their own in each layer")
        key: str = _variant(window, cap)
        return key


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _variant(window: int | None, cap: float | None) -> str:
    return register_variant(window, cap, None)
