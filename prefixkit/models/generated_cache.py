"""The cache that ``generate`` makes by itself: a tree, or what transformers would have taken."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel

from prefixkit.models.errors import UnsupportedModel
from prefixkit.models.shape import kv_spec
from prefixkit.models.tree_cache import TreeCache


class GeneratedCache(TreeCache):
    """What ``generate`` makes by itself: it is a tree for as long as it can be, then the cache that it stands for.

    Args:
        model: The model that generates.
        instead: The cache that transformers has made.
        always: Whether the tree is used wherever it can be, not only where it pays.

    Attributes:
        left: Whether it has become that cache.
    """

    def __init__(self, model: PreTrainedModel, instead: Cache, always: bool) -> None:
        super().__init__(model)
        self.instead, self.always, self.left = instead, always, False

    def leave(self) -> Cache:
        """Become the cache of transformers, with the KV that there is."""
        if not self.left:
            self.copy_to(self.instead)
            self.reset()
            self.left = True
        return self.instead

    def of_another_kind(self) -> bool:
        """Whether the model now computes KV that the pool does not take."""
        try:
            return self._steps is not None and self._steps.memory.spec != kv_spec(self.model)
        except UnsupportedModel:
            return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.instead.get_seq_length(layer_idx) if self.left else super().get_seq_length()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        of: Any = self.instead if self.left else super()
        of.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        of: Any = self.instead if self.left else super()
        of.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        of: Any = self.instead if self.left else super()
        of.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        of: Any = self.instead if self.left else super()
        of.crop(tokens_to_remove)

    @property
    def layers(self) -> list[Any]:
        return self.instead.layers if self.left else super().layers

    @layers.setter
    def layers(self, none: list[Any]) -> None:
        """What the base class would keep."""

    def __len__(self) -> int:
        return len(self.instead) if self.left else super().__len__()

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeCache:
        if not self.left and self.get_seq_length():
            return super().__deepcopy__(memo)
        other = self._empty(memo)
        other.left = self.left
        return other

    def _empty(self, memo: dict[int, Any]) -> GeneratedCache:
        return GeneratedCache(self.model, copy.deepcopy(self.instead, memo), self.always)

    def __reduce__(self) -> tuple[Any, ...]:
        return (copy.copy, (self.instead,)) if self.left else super().__reduce__()

    def activate_past_recording(self) -> None:
        self.instead.activate_past_recording()  # type: ignore[no-untyped-call]
