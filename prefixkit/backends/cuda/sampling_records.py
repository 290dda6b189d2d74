"""What the sampling kernel knows of a row (``csrc/sampling/sample_row.cuh``), and how blocks share a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.backends.cuda import layouts
from prefixkit.engine.request import SamplingParams

LAW = layouts.LAW.dtype
LAW_INTS = LAW.itemsize // 4
STEP, ACTIVE = (layouts.LAW.offset(name) // 4 for name in ("step", "active"))  # as int32 columns

MOST_VOCAB = 2**20
WARPS = 8  # of a block
_STEP = 128  # tokens that a warp takes at a time
_BLOCKS = (1, 2, 4, 8)
# struct Shared of csrc/sampling/sample_block.cuh; the row's cache follows.
HEAD_BYTES = 64 * (8 + 8 + 4 + 3 * 4 + 4) + 32 + 2048 * 4
_BLOCKS_PER_SM = 3


@dataclass(frozen=True)
class Tiling:
    """How a row is dealt out.

    Attributes:
        blocks: Of a row's cluster.
        segment: Tokens of each warp.
        cached: Whether the blocks keep the row in shared memory, so that logits are read once.
    """

    blocks: int
    segment: int
    cached: bool

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return HEAD_BYTES + (4 * WARPS * self.segment if self.cached else 0)


def tile(vocab: int, max_shared: int, clusters: bool) -> Tiling:
    """The fewest blocks of which three fit on a multiprocessor, so that some read while others reckon; else all there are.

    Args:
        vocab: Tokens of a row.
        max_shared: Most shared memory of a block, in bytes.
        clusters: Whether blocks can work together (compute capability 9.0 and later).
    """
    found = Tiling(1, 0, False)
    for blocks in _BLOCKS if clusters else _BLOCKS[:1]:
        steps = -(-vocab // (blocks * WARPS * _STEP))
        found = Tiling(blocks, steps * _STEP, True)
        if found.shared <= max_shared // _BLOCKS_PER_SM:
            return found
    # Every pass reads again what does not fit; more blocks to a row would not change that.
    return found if found.shared <= max_shared else Tiling(found.blocks, found.segment, False)


def records(
    params: Sequence[SamplingParams], keys: NDArray[np.uint64], steps: NDArray[np.integer[Any]]
) -> NDArray[np.int32]:
    """``[rows, LAW_INTS]`` laws of active rows."""
    laws = np.zeros(len(params), dtype=LAW)
    with np.errstate(over="ignore"):  # what float32 does not hold is infinite
        for name in ("temperature", "top_p", "min_p"):
            laws[name] = [getattr(law, name) for law in params]
        laws["penalty"] = [law.repetition_penalty for law in params]
    laws["top_k"] = [min(law.top_k, MOST_VOCAB) for law in params]
    laws["key"], laws["step"], laws["active"] = keys, steps, 1
    return laws.view(np.int32).reshape(len(params), LAW_INTS)


def words(vocab: int) -> int:
    """32-bit words that hold a bit for each token."""
    return -(-vocab // 32)


def mask(history: NDArray[np.integer[Any]], vocab: int) -> NDArray[np.int32]:
    """``[words]`` a bit for each token that the sequence holds; ids beyond the vocabulary are never drawn and left out."""
    held = np.zeros(32 * words(vocab), dtype=bool)
    ids = np.asarray(history, dtype=np.int64)
    held[ids[ids < vocab]] = True
    return np.packbits(held, bitorder="little").view(np.int32)
