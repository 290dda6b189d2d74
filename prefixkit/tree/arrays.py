"""Arrays of integers; ragged ones are rows of different lengths laid end to end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


def indptr_of(counts: NDArray[np.integer]) -> NDArray[np.int32]:
    """``[len(counts) + 1]`` int32 bounds of parts of ``counts[i]`` elements laid end to end."""
    bounds = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def ranges(begin: NDArray[np.integer], count: NDArray[np.integer]) -> NDArray[np.int64]:
    """``begin[0], begin[0] + 1, ...`` for ``count[0]`` numbers, then the same from ``begin[1]``, and so on."""
    ends = count.cumsum()
    numbers: NDArray[np.int64] = (begin - (ends - count)).repeat(count)
    numbers += np.arange(len(numbers))
    return numbers


def padded(values: NDArray[np.int64], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """``[len(counts), longest]``: ragged rows that lie end to end in ``values``, padded with their last elements."""
    longest = int(counts.max())
    if len(values) == len(counts) * longest:  # nothing to pad
        return values.reshape(len(counts), longest)
    begin = counts.cumsum() - counts
    grid: NDArray[np.int64] = values[begin[:, None] + np.minimum(np.arange(longest), counts[:, None] - 1)]
    return grid


def appended(buffer: Ints, size: int, values: Ints) -> Ints:
    """``buffer`` with ``values`` written after its first ``size`` entries; a larger copy where there is no capacity."""
    if size + len(values) > len(buffer):
        buffer = with_capacity(buffer, size, len(values))
    buffer[size : size + len(values)] = values
    return buffer


def with_capacity(buffer: Ints, size: int, extra: int) -> Ints:
    """A copy of ``buffer[:size]`` with capacity for ``extra`` more; doubling makes appending amortised O(1)."""
    larger: Ints = np.empty(max(16, 2 * size, size + extra), np.int32)
    larger[:size] = buffer[:size]
    return larger
