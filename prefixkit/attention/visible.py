"""Visible ranges: from which position on queries see the keys before them."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Visible:
    """The keys that a query sees begin at a position that its own decides, and never lower for a later query.

    Attributes:
        window: A query at position ``p`` sees no key at ``p - window`` or before; None for no limit.
        chunk: It sees no key before the multiple of ``chunk`` at or before ``p``; None for no limit.

    Raises:
        ValueError: one of them is below 1.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, size in (("window", self.window), ("chunk", self.chunk)):
            if size is not None and size < 1:
                raise ValueError(f"Visible: {name} must be at least 1 token, got {size}")

    @property
    def limits(self) -> bool:
        """Whether anything is out of sight, in a text that is long enough."""
        return self.window is not None or self.chunk is not None

    def begin(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """The first visible position of queries at ``positions``, at least 0."""
        first = np.zeros(np.shape(positions), dtype=np.int64)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first

    def within(self, other: Visible) -> Visible:
        """What is read where another limits it too: never less than both show."""
        sizes = ([size for size in pair if size] for pair in zip(astuple(self), astuple(other), strict=True))
        return Visible(*(min(each, default=None) for each in sizes))

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in (("window", self.window), ("chunk", self.chunk)) if size]
        return ", ".join(parts) or "all tokens"


# Everything before a query, and itself.
ALL = Visible()
