"""Positions of texts, which a model asks its cache for where its indexers rotate what they make of several keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

DIMS = 3  # positions of images have so many numbers; of text they are equal


def text_positions(count: int, device: torch.device) -> Tensor:
    """``[3, 1, count]`` int64: 0, 1, 2, ..."""
    return torch.arange(count, device=device).expand(DIMS, 1, -1)


class ShownLayer:
    """A layer of a cache, of which a model asks for the positions of what is before the new tokens.

    A model puts these before the positions of the new ones, and so makes position embeddings of both.  A tree shows the
    positions of a text in order, whatever the new tokens are.  ``positions`` is a method of the cache that holds this
    layer.  Its reference is weak, so that the KV of a cache is freed with the last reference to it, not by a later run
    of the garbage collector.
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
    """No layers, as a tree has nothing to keep in them; but each number has a :class:`ShownLayer`."""

    def __init__(self, positions: Callable[[], Tensor]) -> None:
        super().__init__()
        self._layer = ShownLayer(positions)

    def __getitem__(self, index: Any) -> Any:
        return self._layer if isinstance(index, int) else []
