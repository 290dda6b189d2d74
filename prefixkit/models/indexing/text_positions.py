"""Positions of texts, which models read from the cache if their indexers merge several keys and rotate the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

DIMS = 3  # numbers per position: they differ for images and are equal for text


def text_positions(count: int, device: torch.device) -> Tensor:
    """``[3, 1, count]`` int64: 0, 1, 2, ..."""
    return torch.arange(count, device=device).expand(DIMS, 1, -1)


class ShownLayer:
    """A layer of a cache from which a model reads the positions of the tokens before the new ones.

    A model prepends these to the positions of the new tokens, and makes position embeddings of both.  A tree returns
    the positions of a text in order, whatever the new tokens are.  ``positions`` is a method of the cache that holds
    this layer.  The layer refers to it weakly, so that the KV of a cache is freed with the last reference to the cache,
    not by a later run of the garbage collector.
    """

    def __init__(self, positions: Callable[[], Tensor]) -> None:
        self.__dict__["_positions"] = WeakMethod(positions)

    @property
    def indexer_position_ids(self) -> Tensor:
        """``[3, 1, N]``."""
        positions: Tensor = self.__dict__["_positions"]()()
        return positions

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "indexer_position_ids":
            raise AttributeError(f"a tree does not keep {name!r} in a layer of its cache")


class ShownLayers(list[Any]):
    """An empty list, because a tree stores nothing in layers; but each index returns a :class:`ShownLayer`."""

    def __init__(self, positions: Callable[[], Tensor]) -> None:
        super().__init__()
        self._layer = ShownLayer(positions)

    def __getitem__(self, index: Any) -> Any:
        return self._layer if isinstance(index, int) else []
