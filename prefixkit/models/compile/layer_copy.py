"""A decoder layer as torch.compile sees it."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor, nn

from prefixkit.models.attention_class import original_class, shallow_copy
from prefixkit.models.compile.local_parts import LocalParts, copy_of_module
from prefixkit.models.compile.traced import TracedLayer
from prefixkit.models.model_errors import IncompleteStep
from prefixkit.models.steps.step_cache import CacheLayer, StepCache
from prefixkit.models.weights.state import plain_numbers


class LayerCopy:
    """A shallow copy of a decoder layer, with the original attention class, whose cache is a :class:`TracedLayer`.

    Args:
        layer, child: The decoder layer, and the name of its attention module in it.
        traced: The cache.
        parts: Stand-ins for parts of the layer that are split over processes.
        run: Which of the layer's runs in a step it is for.  A looped model passes each run a number of its own, for
            which torch makes a graph.
    """

    def __init__(self, layer: nn.Module, child: str, traced: TracedLayer, parts: LocalParts, run: int) -> None:
        self.layer, self.child, self.traced, self.index = layer, child, traced, traced.own.index
        self.run = run
        self._local, self._parts = parts, tuple[object, ...]()
        self._weights: list[Tensor | None] = []  # this process's, if the model is split
        self._current = layer

    def current(self) -> nn.Module:
        """The copy, made anew if parts, split weights or numbers of the layer have been replaced."""
        layer = self.layer
        attention = layer._modules[self.child]
        assert attention is not None
        parts = (*layer._modules.values(), *plain_numbers(layer), *plain_numbers(attention))
        weights = self._local.weights_of(layer)
        if parts != self._parts or not all(map(is_, weights, self._weights)):
            inner = shallow_copy(attention, original_class(attention), self.traced)
            inner.__dict__["layer_idx"] = 0  # else each layer would be compiled for its number
            made = copy_of_module(layer, original_class(layer), _modules={**layer._modules, self.child: inner})
            self._current, self._parts = self._local.in_place_of(made), parts
            self._weights = self._local.weights_of(layer)
        return self._current

    def check(self, cache: StepCache, kwargs: dict[str, Any]) -> None:
        """Make the checks of a call that layers make when they are not compiled."""
        attention = self.layer._modules[self.child]
        assert attention is not None
        layer = CacheLayer(cache, attention)
        layer.check_positions(kwargs.get("position_ids"))
        if "attention_mask" in kwargs:
            layer.check_mask(kwargs["attention_mask"])
        if cache.attended[self.index]:
            raise IncompleteStep(f"StepCache: layer {self.index} ran twice in one step; each must run once")
