"""A layer of a tree cache with the attributes that layers of other caches have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerView:
    """A read-only view of a layer: keys and values are copied when they are read.

    Args:
        length: Returns the number of tokens of each row.
        kv: Makes the copies of keys and values.
    """

    length: Callable[[], int]
    kv: Callable[[], tuple[Tensor, Tensor]]

    def get_seq_length(self) -> int:
        """Tokens of each row, padding included."""
        return self.length()

    @property
    def keys(self) -> Tensor:
        """``[rows, kv_heads, length, head_dim]``; keys before a row's first token are undefined."""
        return self.kv()[0]

    @property
    def values(self) -> Tensor:
        """The same for values."""
        return self.kv()[1]
