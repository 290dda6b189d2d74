"""The step in progress, as seen by layers that torch.compile traces."""

from __future__ import annotations

from itertools import chain

from torch import Tensor

from prefixkit.attention.step import Step
from prefixkit.attention.variants import lookup
from prefixkit.models.steps.layer_pages import LayerPages
from prefixkit.models.variants.masked_plans import mask_of, masked_plan
from prefixkit.torch_private import mark_dynamic


class TracedStep:
    """The tensors of the step in progress, in one object for all layers; graphs read them as inputs at every call."""

    slots: Tensor
    positions: Tensor
    plans: list[list[Tensor]]
    masked: list[list[Tensor]]

    def __init__(self) -> None:
        self._masks: dict[tuple[int, str], LayerPages] = {}

    def place_under_mask(self, layer: LayerPages) -> int | None:
        """Index in ``masked`` of the layer's plan with classes of blocks; None if decode steps use no classes."""
        at = layer.plan, mask_of(layer)
        if lookup(at[1]).hides_by_position:
            return None
        self._masks.setdefault(at, layer)
        return list(self._masks).index(at)

    def load(self, step: Step) -> None:
        """Set the tensors of a step."""
        self.slots, self.positions, self.plans = step.slots, step.positions, [plan.tensors for plan in step.plans]
        # Numbers of rows, and a tree's and a plan's sizes, change from step to step: graphs are made for any sizes.
        for tensor in (self.slots, self.positions, *chain(*self.plans)):
            if len(tensor) > 1:
                mark_dynamic(tensor, 0)
        known: dict[tuple[int, str], list[Tensor]] = {}
        masks, of_steps = self._masks.values(), {id(tensor) for tensor in chain(*self.plans)}
        self.masked = [masked_plan(step, self.plans[layer.plan], layer, known) for layer in masks]
        for tensor in chain(*self.masked):
            if id(tensor) not in of_steps and tensor.numel():  # classes, whose rows may have any length
                mark_dynamic(tensor, [0, 1])
