"""The cache that a module with a state gets for some tokens of a step, with the interface of transformers' caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from prefixkit.kv.state_pool import StateTensor
from prefixkit.models.states.fused_functions import PoolState

_MOST_STATES = 8  # of one layer


class _EachLayer(list[Any]):
    """The layers of a cache of which one module runs one: the same layer for any index."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers)
        self.last = len(layers) - 1

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            return super().__getitem__(index)
        if index >= 0:
            self.last = index
        return super().__getitem__(0)


class SegmentCache(Cache):
    """States of some sequences for one call of a module.

    Args:
        layer_idx: The module's layer.
        states: The state tensors that the module keeps; empty if they are not known yet.
        values: ``[sequences, *shape]`` for each of them, or its place in a pool; None at the start of texts.
    """

    def __init__(
        self, layer_idx: int, states: Sequence[StateTensor] = (), values: Sequence[Tensor | PoolState] | None = None
    ) -> None:
        layer: Any = LinearAttentionLayer(number_of_states=_MOST_STATES)
        self.layer = layer
        super().__init__(layers=[])
        self.layers = self.asked = _EachLayer([layer] * (layer_idx + 1))
        for state, value in zip(states, values or (), strict=values is not None):
            layer.device, layer.dtype = value.device, value.dtype
            if state.recurrent:
                layer.recurrent_states[state.index], layer.is_recurrent_states_initialized[state.index] = value, True
            else:
                layer.conv_states[state.index], layer.is_conv_states_initialized[state.index] = value, True
                layer.conv_kernel_size[state.index] = value.shape[-1]
        if values is not None:  # for all states: 5.17 asks without an index
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)

    @property
    def layer_idx(self) -> int:
        """The layer of the model's cache whose states the call has used; in a looped model each loop uses another."""
        return self.asked.last

    def found(self) -> list[StateTensor]:
        """The state tensors that the module keeps, read after a call for texts."""
        kinds = (False, self.layer.conv_states), (True, self.layer.recurrent_states)
        return [
            StateTensor(recurrent, index, tuple(value.shape[1:]), value.dtype)
            for recurrent, values in kinds
            for index, value in values.items()
            if isinstance(value, Tensor)
        ]

    def values(self, states: Sequence[StateTensor]) -> list[Tensor]:
        """``[sequences, *shape]`` for each state after the call, or the place in a pool that was passed for it."""
        kinds = self.layer.conv_states, self.layer.recurrent_states
        return [kinds[one.recurrent][one.index] for one in states]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
