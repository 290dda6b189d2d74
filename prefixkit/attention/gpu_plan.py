"""Plans for the CUDA kernels: wide and narrow work lists, cut to fit one GPU.

Wide items (more than 8 query heads, up to 128) run on the matrix path, one at a time on each multiprocessor; narrow items
(up to 8) on the bandwidth path, one on each of four warps of a multiprocessor.  Both lists run from the longest to the
shortest, each item once for every KV head; worker ``w`` of ``n`` takes entries ``w``, ``2n - 1 - w``, ``2n + w`` and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.cost import CostModel
from prefixkit.attention.formats import BSR, OPEN
from prefixkit.tree.snapshot import Ints

Longs = NDArray[np.int64]

# Query heads of a narrow item, and of a wide one.
NARROW_ROWS = 8
WIDE_ROWS = 128
# Tokens that the roles take at a time.
WIDE_UNIT = 96
NARROW_UNIT = 16
NARROW_WARPS = 4
ITEM_FIELDS = ("q_begin", "q_end", "partial_begin", "seg_begin", "2 * segments + causal", "node", "begin", "end")

# What one multiprocessor does: a wide tile of 128 rows at 450 TFLOP/s, and narrow items at 4 TB/s (head size 128).
WIDE_TOKENS_PER_US = 52.0
NARROW_TOKENS_PER_US = 59.0

# One H200: KV comes at 4.3 TB/s, partial states go out and come back through L2; an item adds its share of a block's time.
H200_COST = CostModel(item=0.02, kv_byte=1 / 4.3e6, partial_byte=1.5 / 4.3e6)


@dataclass(frozen=True)
class _Role:
    """What one role's items cost, in units of its own: per item, per item that leaves a partial state, and to fold one."""

    unit: int
    workers_per_sm: int
    start: float
    leave: float
    fold: float
    least: int  # units below which no item is cut


_WIDE = _Role(WIDE_UNIT, 1, start=1.5, leave=1.0, fold=1.0, least=1)
_NARROW = _Role(NARROW_UNIT, NARROW_WARPS, start=1.0, leave=0.5, fold=0.25, least=4)


@dataclass(frozen=True, eq=False)
class GpuPlan:
    """The work of one tree attention on one GPU.

    Attributes:
        counts: ``[8]`` wide items, narrow items, query rows, partial rows, 1 where wide work is by far the longer part (by
            which the host picks the instantiation), then zeros.
        wide, narrow: ``[items, 8]`` with columns :data:`ITEM_FIELDS`; ``partial_begin = -1``: the item writes the output.
            ``node, begin, end`` repeat the item's first segment.
        segments: ``[segments, 3]`` tokens ``[begin, end)`` of a node; ``end`` may be ``OPEN``.
        merge_indptr: ``[rows + 1]`` bounds of each row's partials; empty where an item writes the output.
        merge_indices: Partial rows in the order of merging, root first.
    """

    counts: Ints
    wide: Ints
    narrow: Ints
    segments: Ints
    merge_indptr: Ints
    merge_indices: Ints

    @property
    def num_rows(self) -> int:
        return int(self.counts[2])

    @property
    def num_partial_rows(self) -> int:
        return int(self.counts[3])

    def arrays(self) -> tuple[Ints, ...]:
        """The six arrays that the kernel takes, in their order."""
        return self.counts, self.wide, self.narrow, self.segments, self.merge_indptr, self.merge_indices

    def kv_tokens_read(self, length: Ints) -> int:
        """Token KVs read in a run over all heads, when node ``n`` holds ``length[n]`` tokens."""
        node, low, high = self.segments.T
        before = np.concatenate(([0], np.cumsum(np.minimum(high, length[node]) - low)))
        begin, count = np.concatenate((self.wide, self.narrow))[:, 3:5].T
        return int((before[begin + count // 2] - before[begin]).sum())


def make_gpu_plan(
    formats: Sequence[BSR],
    length: Ints,
    num_rows: int,
    *,
    group: int,
    kv_heads: int,
    num_sms: int = 132,
    narrow_only: bool = False,
) -> GpuPlan:
    """Cut formats into wide and narrow items.

    Args:
        formats: Block-sparse rows from ``decompose``.
        length: ``[nodes]`` visible tokens of each node now; an OPEN segment counts as this long.
        num_rows: Query rows of the step.
        group: Query heads per KV head.
        kv_heads: KV heads; each item runs once for each.
        num_sms: Multiprocessors that share the work.
        narrow_only: Make narrow items only, for kernels without a matrix path; groups are at most 8 then.

    Returns:
        The plan; the same input always gives the same plan.
    """
    q_begin, q_end, causal, seg_begin, seg_count, segments = _flatten(formats)
    sizes = np.minimum(segments[:, 2], length[segments[:, 0]]) - segments[:, 1]
    before = np.concatenate(([0], np.cumsum(sizes)))
    tokens = before[seg_begin + seg_count] - before[seg_begin]
    row, tile_begin, tile_end = _tile(q_begin, q_end, group, NARROW_ROWS if narrow_only else WIDE_ROWS)
    is_wide = (tile_end - tile_begin) * group > NARROW_ROWS
    pieces = np.ones(len(row), dtype=np.int64)
    for role, mine in ((_WIDE, is_wide), (_NARROW, ~is_wide)):
        if mine.any():
            pieces[mine] = _pieces(role, tokens[row[mine]], kv_heads, num_sms)
    items, segments = _cut(row, tile_begin, tile_end, pieces, causal, seg_begin, seg_count, tokens, segments, sizes)
    first = segments[items[:, 3]]
    order = np.lexsort((items[:, 0], first[:, 1], first[:, 0]))
    items, wide_item = items[order], np.repeat(is_wide, pieces)[order]
    items[:, 2], merge_indptr, merge_indices, partials = _number_partials(items, num_rows)
    cost = items[:, 8]
    items[:, 5:8] = segments[items[:, 3]]
    longest = np.argsort(-cost, kind="stable")
    sorted_items, wide_item = items[longest, :8].astype(np.int32), wide_item[longest]
    wide: Ints = sorted_items[wide_item]
    narrow: Ints = sorted_items[~wide_item]
    wide_bound = _is_wide_bound(tokens[row], is_wide)
    counts = np.array([len(wide), len(narrow), num_rows, partials, wide_bound, 0, 0, 0], dtype=np.int32)
    return GpuPlan(counts, wide, narrow, segments.astype(np.int32), merge_indptr, merge_indices)


def _is_wide_bound(tokens: Longs, is_wide: NDArray[np.bool_]) -> int:
    """1 where the wide tiles take much longer than the narrow items."""
    wide, narrow = int(tokens[is_wide].sum()), int(tokens[~is_wide].sum())
    return int(wide / WIDE_TOKENS_PER_US > 2 * narrow / NARROW_TOKENS_PER_US)


def _flatten(formats: Sequence[BSR]) -> tuple[Longs, Longs, Longs, Longs, Longs, Longs]:
    """All rows of all formats, and one table of their segments."""
    offsets = np.cumsum([0, *(len(bsr.node) for bsr in formats)])

    def joined(parts: list[Ints] | list[Longs]) -> Longs:
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)

    segments = [np.stack((bsr.node, bsr.begin, bsr.end), axis=1) for bsr in formats]
    return (
        joined([bsr.q_begin for bsr in formats]),
        joined([bsr.q_end for bsr in formats]),
        joined([bsr.causal.astype(np.int32) for bsr in formats]),
        joined([bsr.indptr[:-1] + offset for bsr, offset in zip(formats, offsets[:-1], strict=True)]),
        joined([np.diff(bsr.indptr) for bsr in formats]),
        joined(segments).reshape(-1, 3),
    )


def _tile(q_begin: Longs, q_end: Longs, group: int, most: int) -> tuple[Longs, Longs, Longs]:
    """Rows cut into tiles that a role can hold: their row, first and last query."""
    step = np.where((q_end - q_begin) * group <= NARROW_ROWS, q_end - q_begin, max(1, most // group))
    tiles = -(-(q_end - q_begin) // step)
    row = np.repeat(np.arange(len(q_begin)), tiles)
    number = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    begin = q_begin[row] + number * step[row]
    return row, begin, np.minimum(begin + step[row], q_end[row])


def _pieces(role: _Role, tokens: Longs, kv_heads: int, num_sms: int) -> Longs:
    """Into how many pieces each tile's KV is cut: the chunk that ends the longest worker soonest."""
    units = np.maximum(1, -(-tokens // role.unit))
    workers = role.workers_per_sm * num_sms
    longest = int(units.max())
    candidates = sorted(
        {max(role.least, -(-longest // cut)) for cut in (*range(1, 34), 40, 48, 64, 96, 132)} | {longest}
    )
    best, best_time = longest, np.inf
    for chunk in candidates:
        pieces = -(-units // chunk)
        time = _time(role, units, pieces, kv_heads, workers)
        if time < best_time * 0.98:
            best, best_time = chunk, time
    result: Longs = -(-units // best)
    return result


def _time(role: _Role, units: Longs, pieces: Longs, kv_heads: int, workers: int) -> float:
    """When the busiest worker ends, in units, and the time to fold what the cuts left."""
    each = np.repeat(-(-units // pieces) + role.start + np.where(pieces > 1, role.leave, 0.0), pieces)
    each = -np.sort(-each)
    first_of_round = np.arange(0, len(each) * kv_heads, workers) // kv_heads
    left = float(pieces[pieces > 1].sum()) * kv_heads
    return float(each[first_of_round].sum()) + role.fold * left / workers


def _cut(
    row: Longs,
    tile_begin: Longs,
    tile_end: Longs,
    pieces: Longs,
    causal: Longs,
    seg_begin: Longs,
    seg_count: Longs,
    tokens: Longs,
    segments: Longs,
    sizes: Longs,
) -> tuple[Longs, Longs]:
    """Items of ten columns (the fields, then tokens); whole tiles share their row's segments, pieces get their own."""
    tile = np.repeat(np.arange(len(row)), pieces)
    of = row[tile]
    items = np.zeros((len(tile), 9), dtype=np.int64)
    items[:, 0], items[:, 1] = tile_begin[tile], tile_end[tile]
    items[:, 3], items[:, 4], items[:, 8] = seg_begin[of], 2 * seg_count[of] + causal[of], tokens[of]
    added: list[tuple[int, int, int]] = []
    known: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    first_item = np.cumsum(pieces) - pieces
    for t in np.flatnonzero(pieces > 1).tolist():
        r, count = int(row[t]), int(pieces[t])
        if (r, count) not in known:
            known[r, count] = _cut_segments(r, count, seg_begin, seg_count, tokens, segments, sizes, added)
        for piece, (begin, number, size) in enumerate(known[r, count]):
            item = int(first_item[t]) + piece
            items[item, 3], items[item, 4], items[item, 8] = begin, 2 * number + int(causal[r]), size
    if added:
        segments = np.concatenate((segments, np.array(added, dtype=np.int64)))
    return items, segments


def _cut_segments(
    row: int,
    count: int,
    seg_begin: Longs,
    seg_count: Longs,
    tokens: Longs,
    segments: Longs,
    sizes: Longs,
    added: list[tuple[int, int, int]],
) -> list[tuple[int, int, int]]:
    """A row's KV in even pieces, as new segments: ``(first segment, segments, tokens)`` each; only the last stays OPEN."""
    bounds = [int(tokens[row]) * i // count for i in range(count + 1)]
    part = slice(int(seg_begin[row]), int(seg_begin[row] + seg_count[row]))
    mine, size = segments[part].tolist(), sizes[part].tolist()
    result = []
    for piece in range(count):
        low, high, at = bounds[piece], bounds[piece + 1], 0
        start = len(segments) + len(added)
        for number, (node, begin, end) in enumerate(mine):
            a, b = max(low - at, 0), min(high - at, size[number])
            is_end = piece == count - 1 and number == len(mine) - 1
            if a < b or (is_end and end == OPEN):
                added.append((node, begin + a, end if end == OPEN and is_end else begin + b))
            at += size[number]
        result.append((start, len(segments) + len(added) - start, high - low))
    return result


def _number_partials(items: Longs, num_rows: int) -> tuple[Longs, Ints, Ints, int]:
    """Give every item its rows of the partial buffer, and every query row its partials in item order (root first)."""
    touches = np.zeros(num_rows + 1, dtype=np.int64)
    np.add.at(touches, items[:, 0], 1)
    np.add.at(touches, items[:, 1], -1)
    shared = np.concatenate(([0], np.cumsum(np.cumsum(touches)[:num_rows] > 1)))
    leaves = shared[items[:, 1]] > shared[items[:, 0]]
    rows = np.where(leaves, items[:, 1] - items[:, 0], 0)
    begin = np.cumsum(rows) - rows
    total = int(rows.sum())
    row_of = np.arange(total) - np.repeat(begin - items[:, 0], rows)
    by_row = np.argsort(row_of, kind="stable")
    indptr = np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=num_rows))))
    return np.where(leaves, begin, -1), indptr.astype(np.int32), by_row.astype(np.int32), total
