"""How many KV splits each tile gets, so that the multiprocessors of a GPU end together.

Everything is computed from integer sums, whose order does not matter: a planner on the GPU finds the same splits.
"""

from __future__ import annotations

import numpy as np

from prefixkit.attention.gpu.gpu_cost import POINT, Role
from prefixkit.tree.arrays import Longs

# Candidates for the number of KV splits of the longest tile; shorter tiles get splits of the same length.  On the GPU
# each warp of a block evaluates one candidate.  With several workers per multiprocessor, a single tile can feed four
# times as many of them.
CANDIDATES = np.array([*range(1, 17), 18, 20, 22, 24, 26, 28, 30, 33, 36, 40, 48, 56, 64, 80, 96, 132])
CANDIDATES_OF_MANY = np.array([*range(1, 17), 18, 20, 22, 25, 28, 33, 40, 48, 66, 88, 110, 132, 176, 264, 396, 528])
# Lengths are rounded up to multiples of a power of two, such that the longest is at most this many of them.
LEVELS = 128
# The time to merge each partial state of one query, one after another, in 1 / POINT KV tile: some 0.1 us on an H200,
# which is 0.08 KV tiles of a decode worker and 0.13 of a tile.
CHAIN = 8
# Splits add at most this many entries per worker: more never pay, and buffers for plans are of fixed size.
EXTRA = 4


def kv_tiles_of(role: Role, tokens: Longs) -> Longs:
    """KV tiles of ``tokens`` tokens; at least one."""
    return np.maximum(1, -(-tokens // role.kv_tile))


def choose_splits(role: Role, tokens: Longs, kv_heads: int, num_sms: int) -> Longs:
    """``[tiles]`` the number of splits of each tile: the fewest whose time is within 2% of the shortest."""
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
    """``[candidates]`` the time at which the busiest worker ends, in KV tiles / (POINT x workers).

    ``count`` tiles of ``kv_tiles`` KV tiles are split by ``split_size``.  Workers take one entry each per round, the
    longest first, so a round lasts as long as its first entry.  Times are summed by level of length, not by round: the
    rounds that reach a length are those that the entries of at least that length fill.
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
    # Entries of each level or a higher one, from level 1 on.
    at_least = np.cumsum(at_least[:, ::-1], axis=1)[:, LEVELS - 1 :: -1].astype(np.int64) * kv_heads
    left = np.where(splits > 1, entries, 0).sum(axis=1) * kv_heads
    ends: Longs = ((-(-at_least // workers)).sum(axis=1) << shift) * workers + merge * left
    ends += CHAIN * workers * splits.max(axis=1)
    return ends
