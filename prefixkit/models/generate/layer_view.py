"""A layer of a tree cache as other caches show theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class CacheOfLayers(Protocol):
    """What a layer asks of its cache."""

    def get_seq_length(self) -> int: ...

    def kv(self, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class LayerView:
    """A layer of a tree cache as other caches show theirs: copies, made when they are asked for.

    Attributes:
        cache: The tree cache.
        index: The layer.
    """

    cache: CacheOfLayers
    index: int

    def get_seq_length(self) -> int:
        """Tokens of each row, padding included."""
        return self.cache.get_seq_length()

    @property
    def keys(self) -> Tensor:
        """``[rows, kv_heads, length, head_dim]``; what is before a row's first token is not defined."""
        return self.cache.kv(self.index)[0]

    @property
    def values(self) -> Tensor:
        """The same of the values."""
        return self.cache.kv(self.index)[1]
