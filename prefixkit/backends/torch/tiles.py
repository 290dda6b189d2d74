"""A plan as tiles: which query rows meet which slots of the pool, under which mask.

A work item names nodes; a kernel call wants memory.  Here every item is split into tiles with one simple mask each,
whose KV is listed as runs of consecutive slots.  For queries at positions ``p0 .. p1`` of a causal item and one segment
of keys (positions left to right):

    keys  < p0          [p0 .. p1]                 > p1
    full: all see it    triangle: the lower one    no query sees it

All in numpy over whole arrays, because a step may have thousands of items and this runs once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.plan import Plan
from prefixkit.attention.queries import StepTree
from prefixkit.tree.arrays import ranges

Array = NDArray[np.int64]

# A tile's mask.
FULL = 0  # every row sees every key
TRIANGLE = 1  # row i sees keys 0..i
MASKED = 2  # a row sees the keys whose position is not beyond its own


@dataclass(frozen=True, eq=False)
class Tiles:
    """Rows x keys with one simple mask each, in item order.

    Attributes:
        item: ``[tiles]`` the work item that each is a part of.
        row, rows: ``[tiles]`` first query row and number of rows.
        mask: ``[tiles]`` FULL, TRIANGLE or MASKED.
        indptr: ``[tiles + 1]`` bounds of each tile's runs.
        slot, count, position: ``[runs]`` first slot, tokens, position of the first token.
    """

    item: Array
    row: Array
    rows: Array
    mask: Array
    indptr: Array
    slot: Array
    count: Array
    position: Array

    def __len__(self) -> int:
        return len(self.item)

    @cached_property
    def tokens(self) -> Array:
        """``[tiles]`` keys of each."""
        tokens: Array = np.diff(np.concatenate(([0], np.cumsum(self.count)))[self.indptr])
        return tokens


def make_tiles(plan: Plan, tree: StepTree, window: int | None, most_rows: int | None) -> Tiles:
    """Split a plan's items into tiles.

    Args:
        plan: The work items.
        tree: The tree that they are for.
        window: No query sees keys at ``position - window`` or before; None for no limit.
        most_rows: Rows of a tile at most, so that each sees few keys it must mask; None leaves them together.
    """
    items = plan.items.astype(np.int64)
    item, row, rows = _split_rows(items, most_rows)
    slices = _slices(plan, tree, items[item], row, rows, window)
    block, mask, node, low, high, skipped = slices[:, np.argsort(slices[0] * 4 + slices[1], kind="stable")]
    opens = _changes(block, mask, np.where(mask == TRIANGLE, np.arange(len(mask)), -1))
    first = np.flatnonzero(opens)
    run_tile, slot, count, position = _runs(tree, node, low, high, np.cumsum(opens) - 1)
    block, skipped = block[first], skipped[first]
    return Tiles(
        item=item[block],
        row=row[block] + skipped,
        rows=rows[block] - skipped,
        mask=mask[first],
        indptr=np.searchsorted(run_tile, np.arange(len(first) + 1)),
        slot=slot,
        count=count,
        position=position,
    )


def _changes(*keys: Array) -> NDArray[np.bool_]:
    """Where one of some arrays differs from the element before; True at the first element."""
    changes = np.ones(len(keys[0]), dtype=bool)
    changes[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return changes


def _split_rows(items: Array, most: int | None) -> tuple[Array, Array, Array]:
    """Item, first row and number of rows of blocks of query rows."""
    item = np.flatnonzero(items[:, 1] > items[:, 0])
    begin, end = items[item, :2].T
    if most is None:
        return item, begin, end - begin
    blocks = -(-(end - begin) // most)
    row = np.repeat(begin, blocks) + most * ranges(np.zeros_like(blocks), blocks)
    return np.repeat(item, blocks), row, np.minimum(np.repeat(end, blocks) - row, most)


def _slices(plan: Plan, tree: StepTree, items: Array, row: Array, rows: Array, window: int | None) -> Array:
    """``[6, slices]`` slices of single nodes, cut as drawn at the top of this file: number of the block of rows, mask,
    node, the positions ``[low, high)`` of the keys, and how many of the block's first rows see none of them.
    """
    count = items[:, 4] >> 1
    block = np.repeat(np.arange(len(items)), count)
    node, begin, end = plan.segments[ranges(items[:, 3], count)].astype(np.int64).T
    start = tree.snapshot.start[node]
    low, high = start + begin, start + np.minimum(end, tree.length[node])
    q_low, q_high, adjacent = (value[block] for value in _spans(tree.positions, row, rows))
    if window is not None:
        low = np.maximum(low, q_low - window + 1)
    causal = (items[:, 4] & 1).astype(bool)[block]
    high = np.where(causal, np.minimum(high, q_high + 1), high)
    # The triangle starts at q_low; but where that leaves it a single key, every query sees the key.
    split = np.where(adjacent & (high > q_low + 1), np.minimum(high, q_low), np.minimum(high, q_low + 1))
    split = np.maximum(low, np.where(causal, split, high))
    full, rest = low < split, split < high
    none = np.zeros_like(low)
    by_position, skipped = np.where(adjacent, TRIANGLE, MASKED), np.where(adjacent, split - q_low, 0)
    before = np.stack((block, none, node, low, split, none))[:, full]
    after = np.stack((block, by_position, node, split, high, skipped))[:, rest]
    return np.concatenate((before, after), axis=1)


def _spans(q_positions: Array, row: Array, rows: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Lowest and highest position of each block's rows, and whether they go up by one."""
    if not len(row):
        return row, row, np.zeros(0, dtype=bool)
    bounds = np.stack((row, row + rows), axis=1).reshape(-1)
    padded = np.append(q_positions, q_positions[-1])  # reduceat wants every bound to be an index
    low, high = (extreme.reduceat(padded, bounds)[::2] for extreme in (np.minimum, np.maximum))
    jumps = np.concatenate(([0], np.cumsum(np.diff(q_positions) != 1)))
    return low, high, jumps[row + rows - 1] == jumps[row]


def _runs(tree: StepTree, node: Array, low: Array, high: Array, tile: Array) -> tuple[Array, Array, Array, Array]:
    """Tile, first slot, tokens and first position of each run of consecutive slots (and positions)."""
    snapshot, size = tree.snapshot, tree.snapshot.page_size
    tokens = high - low
    within = snapshot.first_slot[node] + low - snapshot.start[node]
    first_page = within // size
    pages = (within + tokens - 1) // size - first_page + 1
    part = np.repeat(np.arange(len(tokens)), pages)
    page = ranges(first_page, pages)
    begin = np.maximum(page * size, within[part])
    count = np.minimum((page + 1) * size, (within + tokens)[part]) - begin
    slot = snapshot.pages[snapshot.page_indptr[node][part] + page].astype(np.int64) * size + begin % size
    position = low[part] + begin - within[part]
    tile = tile[part]
    before = np.cumsum(count) - count
    first = np.flatnonzero(_changes(tile, slot - before, position - before))
    return tile[first], slot[first], np.add.reduceat(count, first) if len(first) else count, position[first]


def split_keys(tiles: Tiles, shortest: int, longest: Array) -> Tiles:
    """Make tiles with a FULL mask easy on memory.

    The keys of several runs have to be gathered into one matrix; runs of at least ``shortest`` tokens become tiles of
    their own, which need no copy.  And no such tile stays longer than ``longest[tile]`` tokens.
    """
    full = tiles.mask == FULL
    whole = (tiles.tokens <= longest) & ((np.diff(tiles.indptr) == 1) | (tiles.tokens < shortest))
    if np.all(whole | ~full):
        return tiles
    tile = np.repeat(np.arange(len(tiles)), np.diff(tiles.indptr))
    limit = np.where(full, longest, np.iinfo(np.int64).max)[tile]
    alone = full[tile] & (tiles.count >= shortest)
    # The short runs of a tile lie end to end, a long run lies by itself; both are split at multiples of the limit.
    before = np.cumsum(np.where(alone, 0, tiles.count)) - np.where(alone, 0, tiles.count)
    begin = np.where(alone, 0, before - before[tiles.indptr[:-1]][tile])
    end = begin + tiles.count
    parts = (end - 1) // limit - begin // limit + 1
    run = np.repeat(np.arange(len(parts)), parts)
    part = begin[run] // limit[run] + ranges(np.zeros_like(parts), parts)
    low = np.maximum(part * limit[run], begin[run])
    high = np.minimum(part * limit[run] + limit[run], end[run])
    tile, shift = tile[run], low - begin[run]
    group = np.where(alone[run], run + 1, 0)  # a tile's short runs first, then each long one
    order = np.lexsort((part, group, tile))
    first = np.flatnonzero(_changes(tile[order], group[order], part[order]))
    parent = tile[order][first]
    return Tiles(
        item=tiles.item[parent],
        row=tiles.row[parent],
        rows=tiles.rows[parent],
        mask=tiles.mask[parent],
        indptr=np.append(first, len(order)),
        slot=(tiles.slot[run] + shift)[order],
        count=(high - low)[order],
        position=(tiles.position[run] + shift)[order],
    )
