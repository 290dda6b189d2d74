"""Blocks of query rows: which rows of an item share a tile, and which keys of the item that tile has.

Rows of kind LIMIT see a staircase of keys::

    rows    keys ->
    0       ####                    the first step: the keys that row 0 sees; every row sees them
    1       ####
    2       #########               a block of the rows that see more, with the keys after that step
    3       #############
            `--'`--------'

If at least half of a block's rows see its first step only, the other rows are a block that is split again.  Else the
other keys are one block for the other rows, which a mask cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.bsr import OPEN, MaskKind
from prefixkit.attention.plan import KINDS, Plan
from prefixkit.tree.arrays import Longs, ranges

# Query rows of a masked block of kind LIMIT by default: few enough that their limits are close together.
LIMITED_ROWS = 128


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """Blocks of rows, in the order of items.

    Attributes:
        item: ``[blocks]`` the work item of each block.
        row, rows: ``[blocks]`` first query row and number of rows.
        limited: ``[blocks]`` whether the block is of kind LIMIT.
        low, high: ``[blocks]`` bounds of the positions of the block's keys, among those of its item.
        masked: ``[blocks]`` whether the block is of kind LIMIT, and some rows do not see all its keys.
        limit_begin: ``[blocks]`` for kind LIMIT the index of the first row's limit in the plan's limits; else 0.
    """

    item: Longs
    row: Longs
    rows: Longs
    limited: NDArray[np.bool_]
    low: Longs
    high: Longs
    masked: NDArray[np.bool_]
    limit_begin: Longs


def split_rows(plan: Plan, items: Longs, most: int | None, limited_rows: int | None) -> RowBlocks:
    """Split the rows of a plan's items into blocks.

    Args:
        plan: The plan of these items, which holds their limits.
        items: ``[items, 8]``.
        most: The most rows of a block; None: no bound.
        limited_rows: The most rows of a masked block of kind LIMIT; None: no bound.
    """
    item = (items[:, 1] > items[:, 0]).nonzero()[0]
    row = items[item, 0]
    rows = items[item, 1] - row
    if most is not None and rows.max(initial=0) > most:
        item, row, rows = _cut(item, row, rows, most)
    limited = items[item, 4] % KINDS == MaskKind.LIMIT
    none = np.zeros_like(item)
    if not limited.any():
        return RowBlocks(item, row, rows, limited, none, none + OPEN, limited, none)
    stairs = _stairs(plan.limits.astype(np.int64), item[limited], row[limited], rows[limited], items, limited_rows)
    whole = np.stack((item, row, rows, none, none + OPEN, none, none))[:, ~limited]
    every = np.concatenate((whole, stairs), axis=1)
    every = every[:, np.argsort(every[0], kind="stable")]
    item, row, rows, low, high, masked, limit_begin = every
    limited = items[item, 4] % KINDS == MaskKind.LIMIT
    return RowBlocks(item, row, rows, limited, low, high, masked.astype(bool), limit_begin)


def _cut(item: Longs, row: Longs, rows: Longs, most: int) -> tuple[Longs, Longs, Longs]:
    """The same rows in blocks of at most ``most`` rows."""
    blocks = -(-rows // most)
    first = np.repeat(row, blocks) + most * ranges(np.zeros_like(blocks), blocks)
    return np.repeat(item, blocks), first, np.minimum(np.repeat(row + rows, blocks) - first, most)


def _stairs(limits: Longs, item: Longs, row: Longs, rows: Longs, items: Longs, limited_rows: int | None) -> Longs:
    """``[7, blocks]`` item, row, rows, low, high, masked and limit_begin of the blocks of rows of kind LIMIT."""
    most = limited_rows or int(rows.max())
    step_end = _ends_of_equal(limits)
    low, found = np.zeros_like(item), []
    while len(item):
        begin = items[item, 2] + row - items[item, 0]
        least, furthest = limits[begin] + 1, limits[begin + rows - 1] + 1
        drop = np.minimum(step_end[begin] - begin, rows)
        halves = 2 * drop >= rows
        large = ~halves & (rows > most)
        takes = ~large
        found.append(np.stack((item, row, rows, low, least, low * 0, begin))[:, takes])
        rest = takes & (drop < rows)
        item_of, row_of, left, to = item[rest], (row + drop)[rest], (rows - drop)[rest], least[rest]
        last = ~halves[rest]
        ends = np.stack((item_of, row_of, left, to, furthest[rest], to * 0 + 1, (begin + drop)[rest]))
        found.append(ends[:, last])
        cut_item, cut_row, cut_rows = _cut(item[large], row[large], rows[large], most)
        cut_low = np.repeat(low[large], -(-rows[large] // most))
        item, row = np.concatenate((item_of[~last], cut_item)), np.concatenate((row_of[~last], cut_row))
        rows, low = np.concatenate((left[~last], cut_rows)), np.concatenate((to[~last], cut_low))
    return np.concatenate(found, axis=1)


def _ends_of_equal(values: Longs) -> Longs:
    """For each number, the index after the run of equal numbers that it is in."""
    after = np.append(values[1:] != values[:-1], True)
    ends = np.where(after, np.arange(1, len(values) + 1), len(values))
    found: Longs = np.minimum.accumulate(ends[::-1])[::-1]
    return found
