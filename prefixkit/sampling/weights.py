"""The weights of tokens as integers: sums are exact in any order, so every device samples the same token.

The arithmetic is part of the specification in ``sampling``; ``csrc/sampling/sample_weight.cuh`` repeats it bit by bit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]

TOP_BITS = 39
# Weights are float32 with integer values; the weight of the likeliest token is 2**39.
TOP = float(2**TOP_BITS)
LOG2E = np.float32(1.4426950408889634)
# Coefficients of 2**f for 0 <= f <= 1, from the highest power down: within 1.7e-7, monotonic, and exact at both ends,
# as a test checks for every f.
EXP2 = tuple(
    np.float32(float.fromhex(text))
    for text in ("0x1.eca6e2p-10", "0x1.269dfcp-7", "0x1.c9442ap-5", "0x1.ebd8a8p-3", "0x1.62e4c8p-1", "0x1p+0")
)
_SCALED = tuple(np.float32(TOP) * factor for factor in EXP2)  # scaled by a power of 2, without rounding
FLOOR = -64.0  # lower bound of exponents; below -39 every weight is 0
_BLOCK = 256  # tokens per block of the two-level cumulative sum
_SUMMED_AT_ONCE = 2**17  # 1 MiB of float64: the weights of some rows stay in the cache


@lru_cache(maxsize=64)  # rows and steps repeat it
def rate(temperature: float) -> np.float32:
    """The factor that turns a difference of scores into an exponent of 2."""
    with np.errstate(over="ignore"):  # a temperature beyond float32 is infinite
        return np.float32(max(LOG2E / np.float32(temperature), np.finfo(np.float32).tiny))


class Scratch(threading.local):
    """Workspace for rows of numbers, kept per thread: faulting in fresh pages for each call would take as long as the
    arithmetic.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Floats] = {}

    def rows(self, use: str, rows: int, tokens: int) -> Floats:
        """``[rows, tokens]`` uninitialised, valid until the next call for the same use."""
        buffer = self._buffers.get(use)
        if buffer is None or buffer.size < rows * tokens:
            buffer = self._buffers[use] = np.empty(rows * tokens, dtype=np.float32)
        return buffer[: rows * tokens].reshape(rows, tokens)


def weigh(scores: Floats, temperatures: Sequence[float], scratch: Scratch | None = None) -> Floats:
    """The weights of rows of scores, ``2**39 * exp((score - largest) / temperature)`` rounded down to integers.

    Args:
        scores: ``[rows, vocab]`` penalised logits, the largest of each row finite.
        temperatures: ``[rows]`` above 0.
        scratch: Workspace that holds the result; None: the result is allocated.

    Returns:
        ``[rows, vocab]`` float32 with integer values from 0 to 2**39.
    """
    space = Scratch() if scratch is None else scratch
    power, whole, weights = (space.rows(use, *scores.shape) for use in ("power", "whole", "weights"))
    with np.errstate(over="ignore"):  # to -inf, which has weight 0
        np.subtract(scores, scores.max(1, keepdims=True), out=power)
        power *= np.array([rate(temperature) for temperature in temperatures])[:, None]
    torch.from_numpy(power).clamp_(min=FLOOR)  # numpy's clip takes five times as long
    np.floor(power, out=whole)
    power -= whole
    np.multiply(power, _SCALED[0], out=weights)
    for factor in _SCALED[1:-1]:
        weights += factor
        weights *= power
    weights += _SCALED[-1]
    # Multiply by 2**whole, which changes only the exponent field.
    whole *= np.float32(2**23)
    shift = power.view(np.int32)  # no longer needed
    np.copyto(shift, whole, casting="unsafe")
    bits = weights.view(np.int32)
    bits += shift
    return np.floor(weights, out=weights)


def block_sums(weights: Floats, scratch: Scratch | None = None) -> NDArray[np.int64]:
    """``[rows, blocks]`` cumulative block sums of weights ``[rows, tokens]``, of at least one token.

    ``scratch``: workspace for the weights of some rows in float64; None: it is allocated.
    """
    rows, tokens = weights.shape
    blocks = np.empty((rows, -(-tokens // _BLOCK)))
    inside = tokens // _BLOCK * _BLOCK
    # Integers below 2**53, so float64 adds them without rounding.
    if inside:
        space, most = Scratch() if scratch is None else scratch, max(1, min(rows, _SUMMED_AT_ONCE // inside))
        wide = torch.from_numpy(space.rows("wide", most, 2 * inside).view(np.float64)).view(most, -1, _BLOCK)
        narrow, sums = torch.from_numpy(weights), torch.from_numpy(blocks)
        for begin in range(0, rows, most):
            some = torch.unflatten(narrow[begin : begin + most, :inside], 1, (-1, _BLOCK))
            count = len(some)
            torch.sum(wide[:count].copy_(some), 2, out=sums[begin : begin + count, : inside // _BLOCK])
    if inside < tokens:
        blocks[:, -1] = weights[:, inside:].sum(1, dtype=np.float64)
    return blocks.astype(np.int64).cumsum(1)


def invert(weights: Floats, blocks: NDArray[np.int64], uniform: float) -> int:
    """The first token whose cumulative weight exceeds ``floor(uniform * total)``; its weight is never 0.

    ``blocks`` is the row of :func:`block_sums` of ``weights [tokens]``; ``uniform`` is in [0, 1).
    """
    target = int(uniform * 2**53) * int(blocks[-1]) >> 53
    block = int(blocks.searchsorted(target, side="right"))
    before = int(blocks[block - 1]) if block else 0
    begin = block * _BLOCK
    inside = weights[begin : begin + _BLOCK].cumsum(dtype=np.float64)
    return begin + int(inside.searchsorted(target - before, side="right"))


def share(total: int, top_p: float) -> int:
    """The least sum of weights that top-p keeps: ``ceil(top_p * total)`` in float64, at least 1, at most ``total``."""
    return max(1, min(math.ceil(top_p * float(total)), total))


def least(min_p: float) -> np.float32:
    """The least weight that min-p keeps: ``ceil(min_p * 2**39)``, rounded up to float32, as all weights are float32."""
    exact = math.ceil(min_p * TOP)
    rounded = np.float32(exact)
    return np.nextafter(rounded, np.float32(np.inf)) if float(rounded) < exact else rounded
