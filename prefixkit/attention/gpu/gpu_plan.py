"""Plans for our kernels: BSR rows split into work items that fit one GPU.

Tile items (up to a tile's query heads) take the tensor-core tile path, one at a time on each multiprocessor; decode
items (up to 8 query heads, or 16) take the decode path, four or two at a time on each multiprocessor.  Both lists are
ordered from the longest item to the shortest, with each item once for every KV head; worker ``w`` of ``n`` takes
entries ``w``, ``2n - 1 - w``, ``2n + w`` and so on (after FlashInfer's Algorithm 1: the longest first, to the least
loaded worker).

This is the specification of plans made on the GPU, which equal it array by array (``csrc/planner/plan_tree.cu``).  So
it computes in integers, and needs only sums, prefix sums and one sort by a small key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.bsr import BSR, OPEN, MaskKind
from prefixkit.attention.gpu.gpu_cost import GpuCost
from prefixkit.attention.gpu.kv_split import choose_splits, kv_tiles_of
from prefixkit.attention.plan import KINDS, BsrRows, Plan, finish_plan, gather_rows
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.visible import lowest_positions
from prefixkit.tree.arrays import Ints, Longs

# Items are sorted by length in this many levels, up to the longest.
ORDER_LEVELS = 128
# Tiles are low if a multiprocessor would get at most this many KV tiles with full ones: then an item's start and end
# and its partial states, half as many in a low tile, cost more than reading KV twice.
FEW_KV_TILES = 6


def make_gpu_plan(
    formats: Sequence[BSR], length: Ints, num_rows: int, shape: HeadShape, num_sms: int, cost: GpuCost
) -> Plan:
    """Split the BSR rows of formats into work items for ``num_sms`` multiprocessors; see also ``make_plan``.

    Each item runs once for each KV head.  ``cost`` says how many query heads the largest tile holds; the kernel splits
    a larger GQA group into slices.

    Raises:
        ValueError: as :func:`gather_rows`.
    """
    rows = gather_rows(formats, length)
    kv_heads, entries = shape.kv_heads, _entries(shape, cost)
    tiles, heads = _high_or_low(rows, shape, num_sms, cost)
    splits = np.ones(len(tiles.row), dtype=np.int64)
    for role, mine in ((cost.tile, tiles.on_tensor_cores), (cost.decode, ~tiles.on_tensor_cores)):
        if mine.any():
            splits[mine] = choose_splits(role, tiles.tokens[mine], entries, num_sms)
    tile, split = _order_items(rows, tiles, splits)
    items, segments, kv_tiles = _split(rows, tiles, splits, tile, split, cost)
    on_tensor_cores = tiles.on_tensor_cores[tile]
    num_tile_items = int(on_tensor_cores.sum())
    hints = _goes_by_head(tiles, num_tile_items, kv_heads, num_sms, cost), _streams(tiles, heads, cost)
    order = _sort(kv_tiles, on_tensor_cores)
    return finish_plan(items, rows, tiles.row[tile], segments, num_rows, num_tile_items, order, hints)


def tile_heads(formats: Sequence[BSR], length: Ints, shape: HeadShape, num_sms: int, cost: GpuCost) -> int:
    """Query heads of a plan's tiles, which are low if there are few.  Arguments and errors are those of
    :func:`make_gpu_plan`.
    """
    return _high_or_low(gather_rows(formats, length), shape, num_sms, cost)[1]


def _entries(shape: HeadShape, cost: GpuCost) -> int:
    """Entries of the work list for an item: KV heads, and slices of a large GQA group."""
    return shape.kv_heads * -(-shape.gqa_group // cost.sharing.tile_heads)


@dataclass(frozen=True, eq=False)
class _Tiles:
    """BSR rows split into tiles of at most a role's query heads; ``first`` and ``count``: the tiles of each BSR row.

    A tile reads ``tokens`` tokens of its row's list, after the first ``skipped`` ones.
    """

    row: Longs
    begin: Longs
    end: Longs
    skipped: Longs
    tokens: Longs
    on_tensor_cores: NDArray[np.bool_]
    first: Longs
    count: Longs

    @property
    def tensor_tokens(self) -> int:
        """Tokens of all tiles of the tensor-core path."""
        return int(self.tokens[self.on_tensor_cores].sum())


def _high_or_low(rows: BsrRows, shape: HeadShape, num_sms: int, cost: GpuCost) -> tuple[_Tiles, int]:
    """The tiles, low or high, and the query heads that a tile holds."""
    high, low, decodes = cost.sharing.tile_heads, cost.low_tile_heads, cost.sharing.decode_heads
    tiles = _tile(rows, shape.gqa_group, high, decodes)
    few = tiles.tensor_tokens * _entries(shape, cost) <= FEW_KV_TILES * cost.tile.kv_tile * num_sms
    return (_tile(rows, shape.gqa_group, low, decodes), low) if low and few else (tiles, high)


def _tile(rows: BsrRows, gqa_group: int, most: int, decode_rows: int) -> _Tiles:
    queries = rows.q_end - rows.q_begin
    step = np.where(queries * gqa_group <= decode_rows, queries, max(1, most // gqa_group))
    count = -(-queries // step)
    first = np.cumsum(count) - count
    row = np.repeat(np.arange(len(queries)), count)
    begin = rows.q_begin[row] + (np.arange(len(row)) - first[row]) * step[row]
    end = np.minimum(begin + step[row], rows.q_end[row])
    # An own-node row's list ends with the row's query tokens: a tile reads up to the token of its last query.
    stop = rows.seg_begin + rows.seg_count
    is_open = rows.segments[stop - 1, 2] == OPEN
    hidden = np.where((rows.kind == MaskKind.OWN) & is_open, rows.q_end, 0)[row] - end
    tokens = (rows.before[stop] - rows.before[rows.seg_begin])[row] - np.maximum(hidden, 0)
    skipped, limited = rows.skip[row].astype(np.int64), np.flatnonzero(rows.limit_begin[row] >= 0)
    tokens -= skipped
    if len(limited):
        # Limits ascend: a tile of such a row reads up to its last query's limit, from the first position a query sees.
        # Both are counted from the list's end: positions may be missing further up.
        of, whole = row[limited], tokens[limited]
        low, high = (rows.limit_begin[of] + at[limited] - rows.q_begin[of] for at in (begin, end))
        unseen = rows.last[of] - rows.limits[high - 1]
        skipped[limited] = np.clip(whole - (rows.last[of] + 1 - lowest_positions(rows.seen_from, low, high)), 0, whole)
        tokens[limited] = np.minimum(whole, whole - unseen) - skipped[limited]
    tokens, on_tensor_cores = np.maximum(tokens, 0), (end - begin) * gqa_group > decode_rows
    return _Tiles(row, begin, end, skipped, tokens, on_tensor_cores, first, count)


def _order_items(rows: BsrRows, tiles: _Tiles, splits: Longs) -> tuple[Longs, Longs]:
    """Tile and KV split of each item.  A shared-prefix row's tiles of the same split are adjacent, for the L2 cache."""
    first = np.cumsum(splits) - splits
    tile = np.repeat(np.arange(len(splits)), splits)
    split = np.arange(len(tile)) - first[tile]
    several = (rows.kind == MaskKind.ALL) & (tiles.count > 1)  # tiles of kind LIMIT differ in length
    if not several.any() or int(splits.max()) == 1:
        return tile, split
    # All tiles of a shared-prefix row but the last have the same splits.
    row = tiles.row[tile]
    number, others = tile - tiles.first[row], tiles.count[row] - 1
    full, last = splits[tiles.first[row]], splits[tiles.first[row] + others]
    ahead = np.where(number < others, np.minimum(split, last), 0)
    before = np.where(number < others, split * others + number, np.minimum(split + 1, full) * others + split)
    position = np.where(several[row], first[tiles.first[row]] + before + ahead, np.arange(len(tile)))
    order = np.empty(len(tile), dtype=np.int64)
    order[position] = np.arange(len(tile))
    return tile[order], split[order]


def _split(
    rows: BsrRows, tiles: _Tiles, splits: Longs, tile: Longs, split: Longs, cost: GpuCost
) -> tuple[Longs, Longs, Longs]:
    """Items, all segments, each item's KV tiles; an unsplit tile uses its BSR row's segments, a KV split gets new ones.

    A tile of kind LIMIT that begins with its row's list and ends earlier uses the first of the row's segments if it
    ends at the end of a segment.
    """
    row, of, tokens = tiles.row[tile], splits[tile], tiles.tokens[tile]
    on_tensor_cores = tiles.on_tensor_cores[tile]
    kv_tile = np.where(on_tensor_cores, cost.tile.kv_tile, cost.decode.kv_tile)
    whole = np.where(on_tensor_cores, kv_tiles_of(cost.tile, tokens), kv_tiles_of(cost.decode, tokens))
    skipped = tiles.skipped[tile]
    low = skipped + whole * split // of * kv_tile
    high = skipped + np.where(split + 1 == of, tokens, whole * (split + 1) // of * kv_tile)
    items = np.zeros((len(tile), 8), dtype=np.int64)
    items[:, 0], items[:, 1] = tiles.begin[tile], tiles.end[tile]
    seg_count, anew = rows.seg_count[row], (of > 1) | (skipped > 0)
    limited = np.flatnonzero((rows.limit_begin[row] >= 0) & ~anew)
    if len(limited):
        base = rows.seg_begin[row[limited]]
        end = rows.before[base] + tokens[limited]
        # The tile's tokens end in this segment; a tile without tokens reads an empty slice of the first segment.
        last = np.searchsorted(rows.before, end) - 1
        seg_count[limited] = np.maximum(last + 1 - base, 1)
        anew[limited] = rows.before[base + seg_count[limited]] > end
    items[:, 3], items[:, 4] = rows.seg_begin[row], KINDS * seg_count + rows.kind[row]
    some = np.flatnonzero(anew)
    segments = rows.segments
    if len(some):
        begin, count, added = _split_segments(rows, row[some], low[some], high[some], split[some] + 1 == of[some])
        items[some, 3], items[some, 4] = len(segments) + begin, KINDS * count + rows.kind[row[some]]
        segments = np.concatenate((segments, added))
    return items, segments, np.maximum(1, -(-(high - low) // kv_tile))


def _split_segments(
    rows: BsrRows, row: Longs, low: Longs, high: Longs, is_end: NDArray[np.bool_]
) -> tuple[Longs, Longs, Longs]:
    """New segments for tokens ``[low, high)`` of BSR rows: first, count, and all segments.  Ends of rows stay OPEN."""
    base, final = rows.before[rows.seg_begin[row]], (rows.seg_begin + rows.seg_count - 1)[row]
    is_open = is_end & (rows.segments[final, 2] == OPEN)
    first = np.minimum(np.searchsorted(rows.before, base + low, side="right") - 1, final)
    last = np.where(is_open, final, np.searchsorted(rows.before, base + high) - 1)
    count = np.maximum(last - first, 0) + 1
    begin = np.cumsum(count) - count
    item = np.repeat(np.arange(len(row)), count)
    source = first[item] + np.arange(len(item)) - begin[item]
    added = rows.segments[source]
    starts, origin = added[:, 1].copy(), rows.before[source]
    size = rows.before[source + 1] - origin
    added[:, 1] += np.maximum((base + low)[item] - origin, 0)
    closed = starts + np.minimum(size, (base + high)[item] - origin)
    added[:, 2] = np.where(is_open[item] & (source == final[item]), OPEN, closed)
    return begin, count, added


def _sort(kv_tiles: Longs, on_tensor_cores: NDArray[np.bool_]) -> Longs:
    """The order of items: tile items, then decode items, each from the longest to the shortest; a stable sort."""
    key = np.zeros(len(kv_tiles), dtype=np.uint16)
    for mine, base in ((on_tensor_cores, ORDER_LEVELS - 1), (~on_tensor_cores, 2 * ORDER_LEVELS - 1)):
        if mine.any():
            key[mine] = base - kv_tiles[mine] * (ORDER_LEVELS - 1) // kv_tiles[mine].max()
    return np.argsort(key, kind="stable")


def _goes_by_head(tiles: _Tiles, items: int, kv_heads: int, num_sms: int, cost: GpuCost) -> int:
    """1 if all tile items of a KV head run before those of the next: the L2 cache then holds the KV of fewer heads.

    Items run from the longest to the shortest, so that workers end together.  Head by head this order is lost between
    heads, which does not matter if items are many, or about equally long.
    """
    if kv_heads == 1 or items * kv_heads <= num_sms:
        return 0
    tokens = tiles.tokens[tiles.on_tensor_cores]
    longest = int(kv_tiles_of(cost.tile, tokens).max()) * cost.tile.kv_tile
    return int(items >= num_sms or 4 * int(tokens.sum()) >= 3 * len(tokens) * longest)


def _streams(tiles: _Tiles, heads: int, cost: GpuCost) -> int:
    """1 if decode items take at least three times as long as tile items: more of their KV should then be in flight."""
    tiled = tiles.tensor_tokens // (2 if heads == cost.low_tile_heads else 1)
    decoded = int(tiles.tokens[~tiles.on_tensor_cores].sum())
    return int(3 * tiled * cost.decode.tokens_per_us <= decoded * cost.tile.tokens_per_us)
