"""Into how many pieces the KV of each tile is cut, so that the multiprocessors of a GPU end together.

All in whole numbers and sums, whose order does not matter: a planner on the GPU finds the same pieces.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.gpu_cost import POINT, Role

Longs = NDArray[np.int64]

# The longest tile is cut into about so many pieces, and shorter ones into pieces as long: the candidates, one per warp of a
# block on the GPU.  Where a multiprocessor has many workers, a lone tile can feed four times as many of them.
CUTS = np.array([*range(1, 17), 18, 20, 22, 24, 26, 28, 30, 33, 36, 40, 48, 56, 64, 80, 96, 132])
CUTS_OF_MANY = np.array([*range(1, 17), 18, 20, 22, 25, 28, 33, 40, 48, 66, 88, 110, 132, 176, 264, 396, 528])
# Lengths are told apart to a power of two of which the longest has at most so many.
LEVELS = 128
# Partial states of one query are folded one after another: each in 0.086 us on an H200, 0.08 units of a decode worker.  One
# counts for more, in 1 / POINT unit: where few workers share a multiprocessor, each is faster than its role says.
CHAIN = 8
# Cuts make at most so many more entries per worker: more never pay, and buffers of plans have a size.
EXTRA = 4


def units_of(role: Role, tokens: Longs) -> Longs:
    """Units that a worker takes for so many tokens; nothing takes less than one."""
    return np.maximum(1, -(-tokens // role.unit))


def cuts_of(role: Role) -> Longs:
    """``[32]`` the candidates of a role."""
    return CUTS_OF_MANY if role.workers > 1 else CUTS


def choose_pieces(role: Role, tokens: Longs, kv_heads: int, num_sms: int) -> Longs:
    """``[tiles]`` pieces of each tile of ``tokens``: the fewest that end within 2% of the soonest."""
    units = units_of(role, tokens)
    count = np.bincount(units)
    distinct = np.flatnonzero(count)
    count = count[distinct]
    chunk = np.maximum(role.least, -(-distinct[-1] // cuts_of(role)))
    pieces = -(-distinct // chunk[:, None])
    workers = role.workers * num_sms
    time = busiest(role, distinct, count, chunk, kv_heads, workers).tolist()
    fits = ((pieces - 1) @ count * kv_heads <= EXTRA * workers).tolist()
    fits[0] = True
    soonest = min(end for end, room in zip(time, fits, strict=True) if room)
    best = next(cut for cut in range(len(chunk)) if fits[cut] and 50 * time[cut] <= 51 * soonest)
    chosen: Longs = -(-units // chunk[best])
    return chosen


def busiest(role: Role, units: Longs, count: Longs, chunk: Longs, kv_heads: int, workers: int) -> Longs:
    """``[cuts]`` when the busiest worker ends, if ``count`` tiles of ``units`` are cut into even pieces of at most ``chunk``.

    Workers take one entry each per round, the longest first, so a round lasts as long as its first entry.  Summed by level
    instead of by round: as many rounds reach a length as entries of that length fill.  In 1 / (POINT x workers) unit.
    """
    start, leave, fold = role.points()
    pieces = -(-units // chunk[:, None])
    size = -(-units // pieces) * POINT + start + np.where(pieces > 1, leave, 0)
    entries = pieces * count
    most = np.minimum(chunk, units.max()) * POINT + start + leave
    shift = np.maximum(np.frexp(most)[1].astype(np.int64) - (LEVELS.bit_length() - 1), 0)
    level = -(-size >> shift[:, None])
    cell = level + (LEVELS + 1) * np.arange(len(pieces))[:, None]
    reach = np.bincount(cell.ravel(), entries.ravel(), len(pieces) * (LEVELS + 1)).reshape(len(pieces), LEVELS + 1)
    # Entries of each level from 1, and above.
    reach = np.cumsum(reach[:, ::-1], axis=1)[:, LEVELS - 1 :: -1].astype(np.int64) * kv_heads
    left = np.where(pieces > 1, entries, 0).sum(axis=1) * kv_heads
    ends: Longs = ((-(-reach // workers)).sum(axis=1) << shift) * workers + fold * left
    if role.workers > 1:
        ends += CHAIN * workers * pieces.max(axis=1)
    return ends
