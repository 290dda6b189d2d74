"""Token arrays at the public edge, and their common prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from prefixkit.tree.arrays import Ints

MAX_TOKEN = int(np.iinfo(np.int32).max)
FIRST_WINDOW, LAST_WINDOW = 256, 65_536  # tokens compared at once: cheap when they differ early, in cache when late


def as_tokens(tokens: ArrayLike) -> Ints:
    """``tokens`` as a checked int32 array ``[n]``, n >= 1; not copied if they are int32 already.

    Raises:
        ValueError: no tokens, more than one dimension, or an id outside ``[0, 2**31)``.
        TypeError: not integers.
    """
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must be one-dimensional, got shape {array.shape}; pass one sequence at a time")
    if array.size == 0:
        raise ValueError("tokens must not be empty; pass at least one token id")
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers, got dtype {array.dtype}; convert them to token ids first")
    lowest = int(np.minimum.reduce(array))  # takes half the time of `min` on short arrays
    if lowest < 0:
        raise ValueError(f"token ids must not be negative, got {lowest}; remove padding before building the tree")
    if array.dtype.itemsize >= 4 and array.dtype != np.int32 and int(array.max()) > MAX_TOKEN:
        raise ValueError(f"token ids must be below 2**31, got {int(array.max())}")
    return array.astype(np.int32, copy=False)


def common_prefix(left: Ints, right: Ints) -> int:
    """How many leading tokens ``left`` and ``right`` share.  Compares windows, never single tokens in Python."""
    end = min(len(left), len(right))
    begin, width = 0, FIRST_WINDOW
    while begin < end:
        stop = min(begin + width, end)
        differs = left[begin:stop] != right[begin:stop]
        first = int(differs.argmax())
        if differs[first]:
            return begin + first
        begin, width = stop, min(2 * width, LAST_WINDOW)
    return end


def in_front_coding(sequences: Sequence[Ints]) -> Iterator[tuple[int, int]]:
    """Sequences in lexicographic order, except that a sequence comes before its prefixes.

    Yields:
        The sequence's number, and the most tokens it shares with a sequence before it: those shared with the last
        one that had tokens of its own.
    """
    # Big-endian bytes are in the order of the tokens.
    order = sorted(range(len(sequences)), key=lambda number: sequences[number].astype(">i4").tobytes() + b"\xff")
    before = np.empty(0, np.int32)
    for number in order:
        tokens = sequences[number]
        shared = common_prefix(before, tokens)
        before = before if shared == len(tokens) else tokens
        yield number, shared


def forks_of(ordered: Sequence[Ints]) -> list[tuple[int, ...]]:
    """The offsets in each sequence at which later ones diverge from it; sequences are in lexicographic order."""
    found: list[tuple[int, ...]] = [()] * len(ordered)
    for i in reversed(range(len(ordered) - 1)):
        shared = common_prefix(ordered[i], ordered[i + 1])
        found[i] = (*(at for at in found[i + 1] if at < shared), *((shared,) if shared else ()))
    return found
