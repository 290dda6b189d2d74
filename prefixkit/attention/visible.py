"""Visible ranges: the first position, and sometimes the last, that a query sees."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Visible:
    """A query sees keys from a position on that depends on its own position, and is never lower for a later query.

    Attributes:
        window: A query at position ``p`` sees no key at ``p - window`` or before; None for no limit.
        chunk: It sees no key before the last multiple of ``chunk`` that is at most ``p``; None for no limit.
        first: No query sees a key before this position.
        until: No query sees a key at this position or after it; None for no limit.
        last: The highest position that queries attend from; later queries attend from it too.  None: each from its own.

    Raises:
        ValueError: ``window``, ``chunk`` or ``until`` is below 1.
    """

    window: int | None = None
    chunk: int | None = None
    first: int = 0
    until: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        for name, size in (("window", self.window), ("chunk", self.chunk), ("until", self.until)):
            if size is not None and size < 1:
                raise ValueError(f"Visible: {name} must be at least 1 token, got {size}")

    @property
    def limits(self) -> bool:
        """Whether any limit is set."""
        return self != ALL

    @property
    def numbers(self) -> tuple[int, int, int]:
        """``window``, ``chunk`` and ``first``, 0 for no limit, as the op ``plan_tree`` takes them."""
        return self.window or 0, self.chunk or 0, self.first

    def begin(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """The first visible position of queries at ``positions``; for a query that sees nothing, after its own."""
        first = np.full(np.shape(positions), self.first, dtype=np.int64)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first

    def count(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """How many keys queries at ``positions`` see."""
        end = positions + 1 if self.until is None else np.minimum(positions + 1, self.until)
        seen: NDArray[np.int64] = np.maximum(end - self.begin(positions), 0)
        return seen

    def within(self, other: Visible) -> Visible:
        """The range to read if ``other`` limits it too: it contains every key that both show."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        window, chunk, _, until, last = (min((size for size in pair if size), default=None) for pair in pairs)
        return Visible(window, chunk, max(self.first, other.first), until, last)

    def __str__(self) -> str:
        names = "window", "chunk", "first", "until", "last"
        parts = [f"{name} {size}" for name, size in zip(names, astuple(self), strict=True) if size]
        return ", ".join(parts) or "all tokens"


# All keys up to the query's own.
ALL = Visible()


def lowest_positions(
    positions: NDArray[np.integer], q_begin: NDArray[np.integer], q_end: NDArray[np.integer]
) -> NDArray[np.int64]:
    """``[rows]`` the lowest of ``positions`` in each range ``[q_begin, q_end)`` of query rows; no range is empty."""
    bounds = np.stack((q_begin, q_end), axis=1).reshape(-1)
    padded = np.append(positions, positions[-1])  # reduceat requires every bound to be an index
    lowest: NDArray[np.int64] = np.minimum.reduceat(padded, bounds)[::2]
    return lowest
