"""A work list as pieces: which query rows meet which slots of the pool, under which mask.

A work item says nodes, an executor wants memory.  Here every item is cut so that each piece has one simple mask, and its KV
is listed as runs of consecutive slots.  For queries at positions ``p0 .. p1`` of a causal item and one segment of keys
(positions left to right):

    keys  < p0           [p0 .. p1]             > p1
    dense: all see it    square: lower triangle  dropped: nobody sees it

All in numpy over whole arrays, because a step may have thousands of items and this runs once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.plan import Plan
from prefixkit.attention.queries import StepTree
from prefixkit.tree.ragged import ranges

Array = NDArray[np.int64]

# Kinds of pieces.
DENSE = 0  # every row sees every key
SQUARE = 1  # row i sees keys 0..i
MASKED = 2  # a row sees the keys whose position is not beyond its own


@dataclass(frozen=True, eq=False)
class Work:
    """A plan and the tree that it is for, in numpy.

    Attributes:
        page_size: Tokens of a page.
        q_begin, q_end: ``[items]`` the query rows of each item.
        causal: ``[items]`` whether a query sees only keys at its own position or before.
        partial_begin: ``[items]`` the first partial row of each item; -1 where it is its rows' only one.
        segment_begin, segment_count: ``[items]`` the segments of each item.
        segments: ``[segments, 3]`` tokens ``[begin, end)`` of a node, as ``(node, begin, end)``.
        merge_indptr, merge_indices: Partial rows of each query row, in the order of merging.
        start, length, page_indptr, pages, first_slot: The tree's nodes; ``length`` counts the tokens of the step.
        q_positions: ``[T]`` the position of each query row.
    """

    page_size: int
    q_begin: Array
    q_end: Array
    causal: Array
    partial_begin: Array
    segment_begin: Array
    segment_count: Array
    segments: Array
    merge_indptr: Array
    merge_indices: Array
    start: Array
    length: Array
    page_indptr: Array
    pages: Array
    first_slot: Array
    q_positions: Array

    @staticmethod
    def of(plan: Plan, tree: StepTree) -> Work:
        """The work of ``plan`` in a step over ``tree``."""
        start, length, page_indptr, pages, first_slot = (array.astype(np.int64) for array in tree.arrays())
        items = plan.items.astype(np.int64)
        return Work(
            page_size=tree.snapshot.page_size,
            q_begin=items[:, 0],
            q_end=items[:, 1],
            causal=items[:, 4] & 1,
            partial_begin=items[:, 2],
            segment_begin=items[:, 3],
            segment_count=items[:, 4] >> 1,
            segments=plan.segments.astype(np.int64),
            merge_indptr=plan.merge_indptr.astype(np.int64),
            merge_indices=plan.merge_indices.astype(np.int64),
            start=start,
            length=length,
            page_indptr=page_indptr,
            pages=pages,
            first_slot=first_slot,
            q_positions=tree.positions(),
        )


@dataclass(frozen=True, eq=False)
class Pieces:
    """Rows x keys with one simple mask each, in item order.

    Attributes:
        item: ``[pieces]`` the work item that each is a part of.
        row, rows: ``[pieces]`` first query row and number of rows.
        kind: ``[pieces]`` DENSE, SQUARE or MASKED.
        indptr: ``[pieces + 1]`` bounds of each piece's runs.
        slot, count, position: ``[runs]`` first slot, tokens, position of the first token.
    """

    item: Array
    row: Array
    rows: Array
    kind: Array
    indptr: Array
    slot: Array
    count: Array
    position: Array

    def __len__(self) -> int:
        return len(self.item)

    @property
    def tokens(self) -> Array:
        """``[pieces]`` keys of each."""
        tokens: Array = np.diff(np.concatenate(([0], np.cumsum(self.count)))[self.indptr])
        return tokens


def cut(work: Work, reach: int | None, tile_rows: int | None) -> Pieces:
    """Cut a work list into pieces.

    Args:
        work: The work list.
        reach: Keys at ``position - reach`` or before are seen by no query; None for no limit.
        tile_rows: Cut items to this many rows first, so that each sees few keys it must mask; None leaves them whole.
    """
    item, row, rows = _tiles(work, tile_rows)
    parts = _Parts.of(work, item, row, rows, reach)
    order = np.argsort(parts.tile * 4 + parts.kind, kind="stable")
    parts = parts.take(order)
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = (parts.tile[1:] != parts.tile[:-1]) | (parts.kind[1:] != parts.kind[:-1]) | (parts.kind[1:] == SQUARE)
    first = np.flatnonzero(opens)
    tile, skipped = parts.tile[first], parts.row_offset[first]
    piece_of_part = np.cumsum(opens) - 1
    run_piece, slot, count, position = _runs(work, parts, piece_of_part)
    return Pieces(
        item=item[tile],
        row=row[tile] + skipped,
        rows=rows[tile] - skipped,
        kind=parts.kind[first],
        indptr=np.searchsorted(run_piece, np.arange(len(first) + 1)),
        slot=slot,
        count=count,
        position=position,
    )


def _tiles(work: Work, tile_rows: int | None) -> tuple[Array, Array, Array]:
    """Item, first row and number of rows of each tile."""
    item = np.flatnonzero(work.q_end > work.q_begin)
    begin, end = work.q_begin[item], work.q_end[item]
    if tile_rows is None:
        return item, begin, end - begin
    tiles = -(-(end - begin) // tile_rows)
    row = np.repeat(begin, tiles) + tile_rows * ranges(np.zeros_like(tiles), tiles)
    return np.repeat(item, tiles), row, np.minimum(np.repeat(end, tiles) - row, tile_rows)


@dataclass(frozen=True, eq=False)
class _Parts:
    """Slices of single nodes: keys at positions ``[low, high)`` of ``node`` for a tile's rows from ``row_offset`` on."""

    tile: Array
    kind: Array
    node: Array
    low: Array
    high: Array
    row_offset: Array

    @classmethod
    def of(cls, work: Work, item: Array, row: Array, rows: Array, reach: int | None) -> _Parts:
        """Cut each tile's segments as drawn at the top of this file."""
        count = work.segment_count[item]
        tile = np.repeat(np.arange(len(item)), count)
        node, begin, end = work.segments[ranges(work.segment_begin[item], count)].T
        low = work.start[node] + begin
        high = work.start[node] + np.minimum(end, work.length[node])
        q_low, q_high, adjacent = (value[tile] for value in _spans(work.q_positions, row, rows))
        if reach is not None:
            low = np.maximum(low, q_low - reach + 1)
        causal = work.causal[item][tile] != 0
        high = np.where(causal, np.minimum(high, q_high + 1), high)
        # The square starts at q_low, to be a triangle; but where that leaves it a single key, everyone sees the key.
        split = np.where(adjacent & (high > q_low + 1), np.minimum(high, q_low), np.minimum(high, q_low + 1))
        split = np.maximum(low, np.where(causal, split, high))
        dense, rest = low < split, split < high
        zero = np.zeros_like(low)
        return cls(
            tile=np.concatenate((tile[dense], tile[rest])),
            kind=np.concatenate((zero[dense], np.where(adjacent, SQUARE, MASKED)[rest])),
            node=np.concatenate((node[dense], node[rest])),
            low=np.concatenate((low[dense], split[rest])),
            high=np.concatenate((split[dense], high[rest])),
            row_offset=np.concatenate((zero[dense], np.where(adjacent, split - q_low, 0)[rest])),
        )

    def take(self, order: Array) -> _Parts:
        return _Parts(*(getattr(self, name)[order] for name in ("tile", "kind", "node", "low", "high", "row_offset")))


def _spans(q_positions: Array, row: Array, rows: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Lowest and highest position of each tile's rows, and whether they go up by one."""
    if not len(row):
        return row, row, np.zeros(0, dtype=bool)
    bounds = np.stack((row, row + rows), axis=1).reshape(-1)
    padded = np.append(q_positions, q_positions[-1])  # reduceat wants every bound to be an index
    low, high = (extreme.reduceat(padded, bounds)[::2] for extreme in (np.minimum, np.maximum))
    jumps = np.concatenate(([0], np.cumsum(np.diff(q_positions) != 1)))
    return low, high, jumps[row + rows - 1] == jumps[row]


def _runs(work: Work, parts: _Parts, piece_of_part: Array) -> tuple[Array, Array, Array, Array]:
    """Piece, first slot, tokens and first position of each run of consecutive slots (and positions)."""
    size = work.page_size
    tokens = parts.high - parts.low
    within = work.first_slot[parts.node] + parts.low - work.start[parts.node]
    first_page = within // size
    pages = (within + tokens - 1) // size - first_page + 1
    part = np.repeat(np.arange(len(tokens)), pages)
    page = ranges(first_page, pages)
    begin = np.maximum(page * size, within[part])
    count = np.minimum((page + 1) * size, (within + tokens)[part]) - begin
    slot = work.pages[work.page_indptr[parts.node][part] + page] * size + begin % size
    position = parts.low[part] + begin - within[part]
    piece = piece_of_part[part]
    opens = np.ones(len(slot), dtype=bool)
    opens[1:] = (
        (piece[1:] != piece[:-1]) | (slot[1:] != (slot + count)[:-1]) | (position[1:] != (position + count)[:-1])
    )
    first = np.flatnonzero(opens)
    return piece[first], slot[first], np.add.reduceat(count, first) if len(first) else count, position[first]


def detach_long_runs(pieces: Pieces, shortest: int, longest: Array) -> Pieces:
    """Make dense pieces easy on memory.

    A piece of several runs has to be gathered into one matrix; runs of at least ``shortest`` tokens become pieces of their
    own, which need no copy.  And no dense piece stays longer than ``longest[piece]`` tokens.
    """
    dense = pieces.kind == DENSE
    whole = (pieces.tokens <= longest) & ((np.diff(pieces.indptr) == 1) | (pieces.tokens < shortest))
    if np.all(whole | ~dense):
        return pieces
    piece = np.repeat(np.arange(len(pieces)), np.diff(pieces.indptr))
    limit = np.where(dense, longest, np.iinfo(np.int64).max)[piece]
    alone = dense[piece] & (pieces.count >= shortest)
    # The short runs of a piece lie end to end, a long run lies by itself; both are cut at multiples of the limit.
    before = np.cumsum(np.where(alone, 0, pieces.count)) - np.where(alone, 0, pieces.count)
    begin = np.where(alone, 0, before - before[pieces.indptr[:-1]][piece])
    end = begin + pieces.count
    cuts = (end - 1) // limit - begin // limit + 1
    run = np.repeat(np.arange(len(cuts)), cuts)
    part = begin[run] // limit[run] + ranges(np.zeros_like(cuts), cuts)
    low = np.maximum(part * limit[run], begin[run])
    high = np.minimum(part * limit[run] + limit[run], end[run])
    piece, shift = piece[run], low - begin[run]
    group = np.where(alone[run], run + 1, 0)  # a piece's short runs first, then each long one
    order = np.lexsort((part, group, piece))
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = np.any([np.diff(key[order]) != 0 for key in (piece, group, part)], axis=0)
    first = np.flatnonzero(opens)
    parent = piece[order][first]
    return Pieces(
        item=pieces.item[parent],
        row=pieces.row[parent],
        rows=pieces.rows[parent],
        kind=pieces.kind[parent],
        indptr=np.append(first, len(order)),
        slot=(pieces.slot[run] + shift)[order],
        count=(high - low)[order],
        position=(pieces.position[run] + shift)[order],
    )
