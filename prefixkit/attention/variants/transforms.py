"""Transforms of whole rows before and after attention, and StreamingLLM's positions in the cache.

A transform maps torch tensors: ``(x [rows, heads, head_dim], positions [rows] int64) -> x``.  FlashInfer's
``QueryTransform``, ``KeyTransform``, ``ValueTransform`` and ``OutputTransform`` (Ye et al. 2025, section 3.2.3) run
each time that a tile is read; these transforms run once for each row, when the row is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Transform = Callable[[Tensor, Tensor], Tensor]
Rows = Literal["query", "key", "value", "output"]


class BadTransform(ValueError):
    """A transform of a variant did not return rows like the ones it was given."""


@dataclass(frozen=True)
class Transforms:
    """Transforms of whole rows, applied in order.

    Attributes:
        query: Applied to queries, before attention.
        key, value: Applied to keys and values, before they are appended to the pool.
        output: Applied to outputs, after all partial states are merged.
    """

    query: tuple[Transform, ...] = ()
    key: tuple[Transform, ...] = ()
    value: tuple[Transform, ...] = ()
    output: tuple[Transform, ...] = ()

    def __bool__(self) -> bool:
        return any(self.by_rows)

    def __add__(self, later: Transforms) -> Transforms:
        """These transforms, followed by the ``later`` ones."""
        return Transforms(*(mine + theirs for mine, theirs in zip(self.by_rows, later.by_rows, strict=True)))

    @property
    def by_rows(self) -> tuple[tuple[Transform, ...], ...]:
        """The transforms of queries, keys, values and outputs."""
        return self.query, self.key, self.value, self.output

    @property
    def functions(self) -> tuple[Transform, ...]:
        """All transforms."""
        return self.query + self.key + self.value + self.output

    def of(self, rows: Rows, x: Tensor, positions: Tensor) -> Tensor:
        """Apply the transforms of such ``rows`` to ``x [rows, heads, head_dim]`` at ``positions [rows]`` int64.

        Each result is rounded to the dtype of ``x``.

        Raises:
            BadTransform: a function returns no tensor, or one of another shape or on another device.
        """
        for function in getattr(self, rows):
            made = function(x, positions)
            if not isinstance(made, Tensor) or made.shape != x.shape or made.device != x.device:
                got = type(made).__name__
                if isinstance(made, Tensor):
                    got = f"{list(made.shape)} on {made.device}"
                raise BadTransform(
                    f"variant: the {rows} transform {getattr(function, '__name__', function)!r} must return a tensor "
                    f"like the one that it gets, {list(x.shape)} (rows, heads, head_dim) on {x.device}, but it "
                    f"returned {got}"
                )
            x = made.to(x.dtype)
        return x


@dataclass(frozen=True)
class Streaming:
    """Positions in the cache (StreamingLLM; Xiao et al. 2024, section 3.2).

    A query sees the first ``sinks`` tokens and the last ``window``, itself included, as if there were no tokens between
    them.

    Attributes:
        sinks: Number of first tokens, at least 1.
        window: Number of last tokens, at least 1.
    """

    sinks: int
    window: int

    @property
    def last(self) -> int:
        """The position of a query in a full cache."""
        return self.sinks + self.window - 1

    def in_cache(self, positions: Tensor) -> Tensor:
        """The positions in the cache of queries at these positions of the text: at most :attr:`last`."""
        return positions.clamp(max=self.last)
