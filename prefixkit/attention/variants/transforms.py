"""What a variant does to whole rows before and after attention, and what StreamingLLM does to positions.

Functions are of torch tensors: ``(x [rows, heads, head_dim], positions [rows] int64) -> x``.  FlashInfer's
``QueryTransform``, ``KeyTransform``, ``ValueTransform`` and ``OutputTransform`` (Ye et al. 2025, section 3.2.3) run
each time that a tile is read; these run once for each row, where the row is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Transform = Callable[[Tensor, Tensor], Tensor]
Rows = Literal["query", "key", "value", "output"]


class BadTransform(ValueError):
    """A transform of a variant has made something else than rows like those that it was given."""


@dataclass(frozen=True)
class Transforms:
    """Functions of whole rows, each after the one before.

    Attributes:
        query: Of queries, before attention.
        key, value: Of keys and values, before they are appended to the pool.
        output: Of outputs, after all partial states are merged.
    """

    query: tuple[Transform, ...] = ()
    key: tuple[Transform, ...] = ()
    value: tuple[Transform, ...] = ()
    output: tuple[Transform, ...] = ()

    def __bool__(self) -> bool:
        return any(self.by_rows)

    def __add__(self, later: Transforms) -> Transforms:
        """These, and then ``later`` ones."""
        return Transforms(*(mine + theirs for mine, theirs in zip(self.by_rows, later.by_rows, strict=True)))

    @property
    def by_rows(self) -> tuple[tuple[Transform, ...], ...]:
        """Those of queries, keys, values and outputs."""
        return self.query, self.key, self.value, self.output

    @property
    def functions(self) -> tuple[Transform, ...]:
        """All of them."""
        return self.query + self.key + self.value + self.output

    def of(self, rows: Rows, x: Tensor, positions: Tensor) -> Tensor:
        """``x [rows, heads, head_dim]`` at ``positions [rows]`` int64 as the functions of such rows make it.

        A result is rounded to the dtype of ``x``.

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

    A query sees the first ``sinks`` tokens and the last ``window``, itself included, as if nothing had ever stood
    between them.

    Attributes:
        sinks: At least 1.
        window: At least 1.
    """

    sinks: int
    window: int

    @property
    def last(self) -> int:
        """Where a query stands in a cache that is full."""
        return self.sinks + self.window - 1

    def in_cache(self, positions: Tensor) -> Tensor:
        """Where queries at positions of the text stand in the cache: behind the sinks and the window, at most."""
        return positions.clamp(max=self.last)
