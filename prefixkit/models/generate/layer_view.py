"""A layer of a tree cache as other caches show theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerView:
    """A layer to look at: copies, made when they are asked for.

    Args:
        length: Says how many tokens each row has.
        kv: Makes the copies of keys and values.
    """

    length: Callable[[], int]
    kv: Callable[[], tuple[Tensor, Tensor]]

    def get_seq_length(self) -> int:
        """Tokens of each row, padding included."""
        return self.length()

    @property
    def keys(self) -> Tensor:
        """``[rows, kv_heads, length, head_dim]``; what is before a row's first token is not defined."""
        return self.kv()[0]

    @property
    def values(self) -> Tensor:
        """The same of the values."""
        return self.kv()[1]
