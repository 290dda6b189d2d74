"""How many KV splits each tile gets, so that the multiprocessors of a GPU end together.

All in whole numbers and sums, whose order does not matter: a planner on the GPU finds the same splits.
"""

from __future__ import annotations

import numpy as np

from prefixkit.attention.gpu.gpu_cost import POINT, Role
from prefixkit.tree.arrays import Longs

# The longest tile gets about this many KV splits, and shorter ones splits as long: the candidates, one per warp of a
# block on the GPU.  Where a multiprocessor has many workers, a lone tile can feed four times as many of them.
CANDIDATES = np.array([*range(1, 17), 18, 20, 22, 24, 26, 28, 30, 33, 36, 40, 48, 56, 64, 80, 96, 132])
CANDIDATES_OF_MANY = np.array([*range(1, 17), 18, 20, 22, 25, 28, 33, 40, 48, 66, 88, 110, 132, 176, 264, 396, 528])
# Lengths are rounded to a power of two, of which the longest has at most this many.
LEVELS = 128
# Partial states of one query are merged one after another: each in some 0.1 us on an H200, 0.08 KV tiles of a decode
# worker and 0.13 of a tile.  In 1 / POINT KV tile.
CHAIN = 8
# Splits add at most this many entries per worker: more never pay, and buffers of plans have a size.
EXTRA = 4


def kv_tiles_of(role: Role, tokens: Longs) -> Longs:
    """KV tiles that a worker takes for ``tokens`` tokens; at least one."""
    return np.maximum(1, -(-tokens // role.kv_tile))


def choose_splits(role: Role, tokens: Longs, kv_heads: int, num_sms: int) -> Longs:
    """``[tiles]`` splits of each tile of ``tokens``: the fewest that end within 2% of the soonest."""
    kv_tiles = kv_tiles_of(role, tokens)
    count = np.bincount(kv_tiles)
    distinct = np.flatnonzero(count)
    count = count[distinct]
    candidates = CANDIDATES_OF_MANY if role.workers > 1 else CANDIDATES
    split_size = np.maximum(role.least, -(-distinct[-1] // candidates))
    splits = -(-distinct // split_size[:, None])
    workers = role.workers * num_sms
    time = busiest(role, distinct, count, split_size, kv_heads, workers).tolist()
    fits = ((splits - 1) @ count * kv_heads <= EXTRA * workers).tolist()
    fits[0] = True
    soonest = min(end for end, fit in zip(time, fits, strict=True) if fit)
    best = next(index for index in range(len(split_size)) if fits[index] and 50 * time[index] <= 51 * soonest)
    chosen: Longs = -(-kv_tiles // split_size[best])
    return chosen


def busiest(role: Role, kv_tiles: Longs, count: Longs, split_size: Longs, kv_heads: int, workers: int) -> Longs:
    """``[candidates]`` when the busiest worker ends, if ``count`` tiles of ``kv_tiles`` are split by ``split_size``.

    Workers take one entry each per round, the longest first, so a round lasts as long as its first entry.  Summed by
    level, not by round: as many rounds reach a length as entries of that length fill.  In KV tiles / (POINT x workers).
    """
    start, write, merge = role.points()
    splits = -(-kv_tiles // split_size[:, None])
    size = -(-kv_tiles // splits) * POINT + start + np.where(splits > 1, write, 0)
    entries = splits * count
    most = np.minimum(split_size, kv_tiles.max()) * POINT + start + write
    shift = np.maximum(np.frexp(most)[1].astype(np.int64) - (LEVELS.bit_length() - 1), 0)
    level = -(-size >> shift[:, None])
    cell = level + (LEVELS + 1) * np.arange(len(splits))[:, None]
    at_least = np.bincount(cell.ravel(), entries.ravel(), len(splits) * (LEVELS + 1)).reshape(len(splits), LEVELS + 1)
    # Entries of each level from 1, and above.
    at_least = np.cumsum(at_least[:, ::-1], axis=1)[:, LEVELS - 1 :: -1].astype(np.int64) * kv_heads
    left = np.where(splits > 1, entries, 0).sum(axis=1) * kv_heads
    ends: Longs = ((-(-at_least // workers)).sum(axis=1) << shift) * workers + merge * left
    ends += CHAIN * workers * splits.max(axis=1)
    return ends
