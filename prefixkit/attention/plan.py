"""Plans: the BSR rows of composable formats as work items, and the order in which partial states merge.

A plan is deterministic, and valid for every layer and every step until the tree's structure changes.  In plain torch a
BSR row is one work item; for our kernels ``attention.gpu.gpu_plan`` splits rows to fit one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.bsr import BSR, MaskKind, no_ints
from prefixkit.attention.paths.runs import Runs, with_run_lengths
from prefixkit.tree.arrays import Ints, Longs, ranges

# An item's fifth number is KINDS * its number of segments + its MaskKind.
KINDS = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """The work of one tree attention.

    Attributes:
        counts: ``[8]`` tile items, decode items, query rows, partial rows, 1 if tile items are taken head by head, 1 if
            decode items take far longer than tile items, zeros.
        tile_items, decode_items: ``[items, 8]`` with columns ``q_begin, q_end, partial_begin, seg_begin, 4 * segments +
            kind, node, begin, end``; ``partial_begin = -1``: the item writes the output; items of kind LIMIT never do.
            The last three columns repeat the item's first segment.
        segments: ``[segments, 3]`` tokens ``[begin, end)`` of a node; ``end`` may be ``OPEN``.
        merge_indptr: ``[query rows + 1]`` bounds of each query row's partial rows; a query row whose output an item
            writes has none.
        merge_indices: Partial rows in the order of merging, root first.
        limits: ``[partial rows]`` for items of kind LIMIT the position of the last token that the query sees, else 0.
            Empty if no item is of kind LIMIT.
        runs: Runs, numbered after the tree's nodes, that segments may refer to; None if none does.
    """

    counts: Ints
    tile_items: Ints
    decode_items: Ints
    segments: Ints
    merge_indptr: Ints
    merge_indices: Ints
    limits: Ints = field(default_factory=no_ints)
    runs: Runs | None = None

    def arrays(self) -> tuple[Ints, ...]:
        """The seven arrays that the kernel takes, in their order."""
        items = self.tile_items, self.decode_items
        return self.counts, *items, self.segments, self.merge_indptr, self.merge_indices, self.limits

    @property
    def items(self) -> Ints:
        """``[items, 8]`` all items, tile items first."""
        return np.concatenate((self.tile_items, self.decode_items))

    def kv_tokens_read(self, length: Ints) -> int:
        """Token KVs that the plan reads, for all heads, when node ``n`` has ``length[n]`` tokens."""
        node, low, high = self.segments.T
        tokens = np.minimum(high, with_run_lengths(length, self.runs)[node]) - low
        before = np.concatenate(([0], np.cumsum(tokens)))
        begin, count = self.items[:, 3:5].T
        return int((before[begin + count // KINDS] - before[begin]).sum())


def make_plan(formats: Sequence[BSR], length: Ints, num_rows: int) -> Plan:
    """Make a plan with one item for each BSR row of the formats; the same input always gives the same plan.

    Args:
        formats: Block-sparse rows, from ``decompose`` or for a custom mask, over nodes of one tree.
        length: ``[nodes]`` current visible tokens of each node; an OPEN segment counts as this long.
        num_rows: Query rows of the step.

    Raises:
        ValueError: as :func:`gather_rows`.
    """
    rows = gather_rows(formats, length)
    items = np.zeros((len(rows.q_begin), 8), dtype=np.int64)
    items[:, 0], items[:, 1] = rows.q_begin, rows.q_end
    items[:, 3], items[:, 4] = rows.seg_begin, KINDS * rows.seg_count + rows.kind
    every = np.arange(len(items))
    return finish_plan(items, rows, every, rows.segments, num_rows, len(items), every, (0, 0))


def finish_plan(
    items: Longs,
    rows: BsrRows,
    row: Longs,
    segments: Longs,
    num_rows: int,
    num_tile_items: int,
    order: Longs,
    hints: tuple[int, int],
) -> Plan:
    """Number the partial rows of items, which come root first, and list the items in ``order``, tile items first.

    ``row`` is the BSR row of each item.
    """
    items[:, 2], merge_indptr, merge_indices, partials = _number_partials(items, num_rows)
    items[:, 5:8] = segments[items[:, 3]]
    limits = no_ints()
    if len(rows.limits):
        limits = np.zeros(partials, dtype=np.int32)
        limited = np.flatnonzero(items[:, 4] % KINDS == MaskKind.LIMIT)
        q_begin, q_end, partial = items[limited, :3].T
        first = rows.limit_begin[row[limited]] + q_begin - rows.q_begin[row[limited]]
        limits[ranges(partial, q_end - q_begin)] = rows.limits[ranges(first, q_end - q_begin)]
    ordered = items[order].astype(np.int32)
    counts = np.array([num_tile_items, len(items) - num_tile_items, num_rows, partials, *hints, 0, 0], dtype=np.int32)
    lists = ordered[:num_tile_items], ordered[num_tile_items:], segments.astype(np.int32)
    return Plan(counts, *lists, merge_indptr, merge_indices, limits, rows.runs)


@dataclass(frozen=True, eq=False)
class BsrRows:
    """The BSR rows of all formats, ancestors first, and a table of their segments with the tokens before each segment.

    Attributes:
        kind: ``[rows]`` the :class:`MaskKind` of each row.
        first, last: ``[rows]`` the positions of the first and the last token of each list.
        limit_begin: ``[rows]`` where ``limits`` and ``seen_from`` begin for rows of kind LIMIT, -1 for others.
        skip: ``[rows]`` tokens at the beginning of each list that its tiles skip, besides those before ``seen_from``.
        runs: Runs, numbered after the tree's nodes, that segments may refer to; None if none does.
    """

    q_begin: Longs
    q_end: Longs
    kind: Longs
    first: Longs
    last: Longs
    seg_begin: Longs
    seg_count: Longs
    segments: Longs
    before: Longs
    limit_begin: Longs
    limits: Ints
    seen_from: Ints
    skip: Ints
    runs: Runs | None


def gather_rows(formats: Sequence[BSR], length: Ints) -> BsrRows:
    """Gather the BSR rows of all formats, where node ``n`` has ``length[n]`` tokens.

    Raises:
        ValueError: a format does not have one limit for each query of its rows of kind LIMIT, or limits descend within
            a row; or several formats have runs.
    """
    q_begin, q_end, kind, node, begin, end, first, last = (
        _joined([getattr(bsr, name) for bsr in formats])
        for name in ("q_begin", "q_end", "kind", "node", "begin", "end", "first", "last")
    )
    seg_count = _joined([bsr.indptr[1:] - bsr.indptr[:-1] for bsr in formats])
    seg_begin = np.cumsum(seg_count) - seg_count
    every_run = [bsr.runs for bsr in formats if bsr.runs is not None]
    if len(every_run) > 1:
        raise ValueError(f"make_plan: one format may have runs, got {len(every_run)} that do; decompose one with paths")
    runs = every_run[0] if every_run else None
    length = with_run_lengths(length, runs)
    before = np.concatenate(([0], np.cumsum(np.minimum(end, length[node]) - begin)))
    limit_begin, limits = _limits_of(formats, q_end - q_begin, kind == MaskKind.LIMIT)
    segments = np.stack((node, begin, end), axis=1)
    skip = np.concatenate([no_ints(), *(bsr.skip if len(bsr.skip) else np.zeros_like(bsr.kind) for bsr in formats)])
    if len(formats) > 1:  # root first, so that a query's partial states merge in this order; one format is in order
        order = np.lexsort((kind, -q_end, q_begin, first))
        q_begin, q_end, kind, first, last = (of[order] for of in (q_begin, q_end, kind, first, last))
        seg_begin, seg_count, limit_begin, skip = (of[order] for of in (seg_begin, seg_count, limit_begin, skip))
    columns = q_begin, q_end, kind, first, last, seg_begin, seg_count
    seen_from = np.concatenate([no_ints(), *map(_seen_from, formats)])
    return BsrRows(*columns, segments, before, limit_begin, limits, seen_from, skip, runs)


def _joined(arrays: Sequence[Ints]) -> Longs:
    """One array after another, as int64."""
    if len(arrays) == 1:
        return arrays[0].astype(np.int64)
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])


def _seen_from(bsr: BSR) -> Ints:
    """For each query of a row of kind LIMIT, the position of the first token that it sees."""
    if len(bsr.seen_from):
        return bsr.seen_from
    limited = bsr.kind == MaskKind.LIMIT
    return np.repeat(bsr.first[limited], (bsr.q_end - bsr.q_begin)[limited])


def _limits_of(formats: Sequence[BSR], queries: Longs, limited: NDArray[np.bool_]) -> tuple[Longs, Ints]:
    """Where the limits of each row begin, -1 if it has none, and all limits: one for each of a row's ``queries``."""
    if not limited.any() and not any(len(bsr.limit) for bsr in formats):
        return np.full(len(limited), -1), no_ints()
    for bsr in formats:
        wanted = int((bsr.q_end - bsr.q_begin)[bsr.kind == MaskKind.LIMIT].sum())
        if len(bsr.limit) != wanted:
            raise ValueError(f"BSR: limit must have one entry for each of {wanted} query rows, got {len(bsr.limit)}")
    limits = np.concatenate([no_ints(), *(bsr.limit for bsr in formats)])
    count = np.where(limited, queries, 0)
    begin = np.cumsum(count) - count
    descends = np.diff(limits) < 0
    descends[begin[limited & (begin > 0)] - 1] = False  # between two rows
    if descends.any():
        at = int(np.argmax(descends))
        raise ValueError(
            f"BSR: the limits of a row must ascend, got {limits[at]} before {limits[at + 1]}; order queries"
        )
    return np.where(limited, begin, -1), limits.astype(np.int32)


def _number_partials(items: Longs, num_rows: int) -> tuple[Longs, Ints, Ints, int]:
    """Give every item its partial rows, and list the partial rows of every query row in item order (root first)."""
    touches = np.bincount(items[:, 0], minlength=num_rows + 1) - np.bincount(items[:, 1], minlength=num_rows + 1)
    shared = np.concatenate(([0], np.cumsum(np.cumsum(touches)[:num_rows] > 1)))
    is_partial = (shared[items[:, 1]] > shared[items[:, 0]]) | (items[:, 4] % KINDS == MaskKind.LIMIT)
    rows = np.where(is_partial, items[:, 1] - items[:, 0], 0)
    begin = np.cumsum(rows) - rows
    total = int(rows.sum())
    row_of = np.arange(total) - np.repeat(begin - items[:, 0], rows)
    # numpy sorts 16-bit numbers by counting, in linear time.
    by_row = np.argsort(row_of.astype(np.uint16) if num_rows <= 2**16 else row_of, kind="stable")
    indptr = np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=num_rows))))
    return np.where(is_partial, begin, -1), indptr.astype(np.int32), by_row.astype(np.int32), total
