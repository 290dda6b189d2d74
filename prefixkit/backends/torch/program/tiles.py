"""A plan as tiles: which query rows attend to which slots of the pool, under which mask.

A work item names nodes, but a kernel call needs memory.  Here every item is split into tiles with one simple mask each,
whose KV is listed as runs of consecutive slots.  For queries at positions ``p0 .. p1`` of a causal item and one segment
of keys (positions left to right):

    keys  < p0          [p0 .. p1]                 > p1
    full: all see it    triangle (lower)           no query sees it

All in numpy over whole arrays, because a step may have thousands of items and this runs once a step.  Most steps have
few: then a call of numpy takes longer than its work, and methods of arrays take half as long as functions around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.bsr import MaskKind
from prefixkit.attention.paths.runs import with_runs
from prefixkit.attention.plan import KINDS, Plan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.visible import Visible
from prefixkit.backends.torch.program.row_blocks import LIMITED_ROWS, RowBlocks, split_rows
from prefixkit.tree.arrays import Ints, Longs, ranges

# A tile's mask.
FULL = 0  # every row sees every key
TRIANGLE = 1  # row i sees keys 0..i
MASKED = 2  # a row sees the keys up to its own position, or up to its reach
LIMITED = 3  # a row sees the keys up to its limit


@dataclass(frozen=True, eq=False)
class Tiles:
    """Rows x keys with one simple mask each, in item order.

    Attributes:
        item: ``[tiles]`` the work item of each tile.
        row, rows: ``[tiles]`` first query row and number of rows.
        mask: ``[tiles]`` FULL, TRIANGLE, MASKED or LIMITED.
        indptr: ``[tiles + 1]`` bounds of each tile's runs.
        slot, count, position: ``[runs]`` first slot, tokens, position of the first token.
        limit_begin: ``[tiles]`` for LIMITED tiles the index of the first row's limit in the plan's limits.
    """

    item: Longs
    row: Longs
    rows: Longs
    mask: Longs
    indptr: Longs
    slot: Longs
    count: Longs
    position: Longs
    limit_begin: Longs

    def __len__(self) -> int:
        return len(self.item)

    @cached_property
    def tokens(self) -> Longs:
        """``[tiles]`` the number of keys of each tile."""
        ends = np.zeros(len(self.count) + 1, dtype=np.int64)
        self.count.cumsum(out=ends[1:])
        ends = ends[self.indptr]
        tokens: Longs = ends[1:] - ends[:-1]
        return tokens

    @cached_property
    def runs(self) -> Longs:
        """``[tiles]`` the number of runs of each tile."""
        runs: Longs = self.indptr[1:] - self.indptr[:-1]
        return runs


def make_tiles(
    plan: Plan,
    tree: StepTree,
    visible: Visible,
    most_rows: int | None,
    reach: Longs | None = None,
    limited_rows: int | None = LIMITED_ROWS,
    whole_from: int | None = None,
) -> Tiles:
    """Split a plan's items into tiles.

    Args:
        plan: The work items.
        tree: The plan's tree.
        visible: The range of keys that queries see; keys before it are in no tile.
        most_rows: The most rows of a tile, so that few of its keys are masked for a row; None: no bound.
        reach: ``[rows]`` the last position that each query row may see; None: its own.
        limited_rows: The same as ``most_rows`` for tiles with masks by limits.
        whole_from: At least this many consecutive rows and the keys of one node stay one MASKED tile; None: they are
            cut as drawn above.
    """
    items = plan.items.astype(np.int64)
    blocks, nodes = split_rows(plan, items, most_rows, limited_rows), with_runs(tree.arrays(), plan.runs)
    slices = _slices(plan, tree, nodes, items[blocks.item], blocks, visible, reach, whole_from)
    block, mask, node, low, high, skipped = slices[:, (slices[0] * 4 + slices[1]).argsort(kind="stable")]
    opens = _changes(block, mask) | (mask == TRIANGLE)
    first = opens.nonzero()[0]
    run_tile, slot, count, position = _runs(nodes, tree.snapshot.page_size, node, low, high, opens.cumsum() - 1)
    block, skipped = block[first], skipped[first]
    return Tiles(
        item=blocks.item[block],
        row=blocks.row[block] + skipped,
        rows=blocks.rows[block] - skipped,
        mask=mask[first],
        indptr=run_tile.searchsorted(np.arange(len(first) + 1)),
        slot=slot,
        count=count,
        position=position,
        limit_begin=blocks.limit_begin[block],
    )


def _changes(*keys: Longs) -> NDArray[np.bool_]:
    """Where an element of any of the arrays differs from the one before; True at the first element."""
    changes = np.ones(len(keys[0]), dtype=bool)
    after_first = changes[1:]
    np.not_equal(keys[0][1:], keys[0][:-1], out=after_first)
    for key in keys[1:]:
        after_first |= key[1:] != key[:-1]
    return changes


def _slices(
    plan: Plan,
    tree: StepTree,
    nodes: tuple[Ints, ...],
    items: Longs,
    blocks: RowBlocks,
    visible: Visible,
    reach: Longs | None,
    whole_from: int | None,
) -> Longs:
    """``[6, slices]`` slices of single nodes, cut as drawn at the top of this file.

    Each has the number of its block of rows, the mask, the node, the positions ``[low, high)`` of the keys, and the
    number of the block's first rows that see none of these keys.
    """
    count, kind = items[:, 4] // KINDS, items[:, 4] % KINDS
    block = np.arange(len(items)).repeat(count)
    node, begin, end = plan.segments[ranges(items[:, 3], count)].astype(np.int64).T
    start, length, *_ = nodes
    low, high = start[node] + begin, start[node] + np.minimum(end, length[node])
    lowest, highest, in_sequence = _spans(tree.positions, blocks.row, blocks.rows)
    q_low, q_high, adjacent = lowest[block], highest[block], in_sequence[block]
    if visible.limits:
        low = np.maximum(low, visible.begin(q_low))
    causal = (kind == MaskKind.OWN)[block]
    if reach is not None:
        (_, furthest, _), adjacent = _spans(reach, blocks.row, blocks.rows), np.zeros_like(adjacent)
        q_high = furthest[block]
    high = np.where(causal, np.minimum(high, q_high + 1), high)
    # The triangle starts at q_low; but if it would have a single key, every query sees that key.
    split = np.where(adjacent & (high > q_low + 1), np.minimum(high, q_low), np.minimum(high, q_low + 1))
    split = np.maximum(low, np.where(causal, split, high))
    by_position, skipped = np.where(adjacent, TRIANGLE, MASKED), np.where(adjacent, split - q_low, 0)
    if whole_from is not None:
        whole = adjacent & causal & ((count == 1) & (blocks.rows >= whole_from))[block]
        split, skipped = np.where(whole, low, split), np.where(whole, 0, skipped)
        by_position = np.where(whole, MASKED, by_position)
    if blocks.limited.any():
        limited, masked = blocks.limited[block], blocks.masked[block]
        low, high = np.maximum(low, blocks.low[block]), np.minimum(high, blocks.high[block])
        split = np.where(limited, np.where(masked, low, high), split)
        by_position, skipped = np.where(limited, LIMITED, by_position), np.where(limited, 0, skipped)
    slices = np.zeros((6, 2, len(block)), dtype=np.int64)
    slices[0], slices[2] = block, node
    slices[3, 0], slices[4, 0] = low, split
    slices[1, 1], slices[3, 1], slices[4, 1], slices[5, 1] = by_position, split, high, skipped
    return slices[:, slices[3] < slices[4]]


def _spans(q_positions: Longs, row: Longs, rows: Longs) -> tuple[Longs, Longs, NDArray[np.bool_]]:
    """Lowest and highest position of each block's rows, and whether the positions ascend by one."""
    if not len(row):
        return row, row, np.zeros(0, dtype=bool)
    bounds = np.empty(2 * len(row), dtype=np.int64)
    bounds[::2], bounds[1::2] = row, row + rows
    padded = np.concatenate((q_positions, q_positions[-1:]))  # reduceat needs every bound to be an index
    low, high = np.minimum.reduceat(padded, bounds)[::2], np.maximum.reduceat(padded, bounds)[::2]
    jumps = np.zeros(len(q_positions), dtype=np.int64)
    (q_positions[1:] - q_positions[:-1] != 1).cumsum(out=jumps[1:])
    return low, high, jumps[row + rows - 1] == jumps[row]


def _runs(
    nodes: tuple[Ints, ...], size: int, node: Longs, low: Longs, high: Longs, tile: Longs
) -> tuple[Longs, Longs, Longs, Longs]:
    """Tile, first slot, tokens and first position of each run of consecutive slots (and positions)."""
    start, _, page_indptr, pages_of, first_slot = nodes
    tokens = high - low
    within = first_slot[node] + low - start[node]
    first_page = within // size
    pages = (within + tokens - 1) // size - first_page + 1
    part = np.arange(len(tokens)).repeat(pages)
    page = ranges(first_page, pages)
    begin = np.maximum(page * size, within[part])
    count = np.minimum((page + 1) * size, (within + tokens)[part]) - begin
    slot = pages_of[page_indptr[node][part] + page].astype(np.int64) * size + begin % size
    position = low[part] + begin - within[part]
    tile = tile[part]
    before = count.cumsum() - count
    first = _changes(tile, slot - before, position - before).nonzero()[0]
    return tile[first], slot[first], np.add.reduceat(count, first) if len(first) else count, position[first]


def split_keys(tiles: Tiles, shortest: int, longest: Longs) -> Tiles:
    """Split the keys of tiles with a FULL or LIMITED mask, to save copies and memory.

    The keys of several runs have to be gathered into one matrix; under a FULL mask runs of at least ``shortest`` tokens
    become tiles of their own, which need no copy.  No such tile stays longer than ``longest[tile]`` tokens.
    """
    full, limited = tiles.mask == FULL, tiles.mask == LIMITED
    detached = full & (tiles.runs > 1) & (tiles.tokens >= shortest)
    if not (detached | ((tiles.tokens > longest) & (full | limited))).any():
        return tiles
    tile = np.arange(len(tiles)).repeat(tiles.runs)
    limit = np.where(full | limited, longest, np.iinfo(np.int64).max)[tile]
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
    group = np.where(alone[run], run + 1, 0)  # a tile's short runs first, then each long run
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
        limit_begin=tiles.limit_begin[parent],
    )
