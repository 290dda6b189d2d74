"""Caches that give every attention layer a part of its own, and what that part does for the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn
from transformers import Cache

from prefixkit.attention.step import Step
from prefixkit.attention.variants import Variant
from prefixkit.models.indexing.text_positions import ShownLayers
from prefixkit.models.model_errors import NotPatched


class Compiled(Protocol):
    """Layers that run through torch.compile; see ``CompiledLayers``."""

    active: bool

    def start_step(self, step: Step) -> None: ...

    def run(self, cache: Any, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


Bias = Callable[[], Variant]  # called where tensors have values


class LayerCache(Protocol):
    """The object that an attention module's original ``forward`` and our attention function get as the cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the ``[1, kv_heads, T, head_dim]`` keys and values of a forward pass; returns what to attend over."""

    def check(self, key: Tensor, value: Tensor, attention_mask: Any) -> None:
        """Raise unless the layer attends over the K and V that :meth:`update` returned, without a mask of its own."""

    def attend(
        self,
        query: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
        sinks: Tensor | None,
        bias: Bias | None = None,
    ) -> Tensor:
        """``query [1, heads, T, head_dim]`` to ``[1, T, heads, head_dim]``; ``bias`` makes a variant such as ALiBi;
        sinks are ``[heads]``, or ``[T, heads]`` where the layer adds a bias of its own.
        """


class LayeredCache(Cache):
    """A cache that gives every patched attention module a part of its own, for the length of a call.

    The base class sees no layers and no keys, so it answers as an empty cache: its length is zero, and it is not
    compileable.

    Attributes:
        num_layers: Attention modules.
        compiled: The layers that run through torch.compile, or None.
    """

    compiled: Compiled | None = None
    is_sliding: list[bool] = []  # in the base class a property, which asks its layers
    is_linear: list[bool] = []
    is_dummy: list[bool] = []

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.layers = ShownLayers(self.text_positions)
        self.num_layers = num_layers
        # Attention variants apply windows, and states have caches of their own.
        self.is_sliding = self.is_linear = self.is_dummy = [False] * num_layers

    def text_positions(self) -> Tensor:
        """``[3, 1, N]`` int64 the positions 0 to N - 1, where N - 1 is the largest position in the step."""
        raise NotImplementedError

    @property
    def position_ids(self) -> Tensor:
        """The same positions, for models that ask the cache and not its layers."""
        return self.text_positions()

    @position_ids.setter
    def position_ids(self, positions: Tensor) -> None:
        """Ignore the positions that a model would keep for its next pass."""

    def layer(self, module: nn.Module, position_ids: Tensor | None) -> LayerCache:
        """An attention module's part for one call of its ``forward``, which may have received ``position_ids``."""
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotPatched: only layers that are not patched call this; patched layers write through their part."""
        raise NotPatched(
            f"layer {layer_idx} was given a {type(self).__name__}, but it is not patched; call prefixkit.patch(model) "
            "first, and after anything that wraps or replaces attention layers"
        )

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, as transformers writes "no maximum"."""
        return -1

    def __len__(self) -> int:
        return self.num_layers

    is_initialized = True
    is_croppable = False
    batch_size = 1  # one row of tokens, whatever the number of sequences
