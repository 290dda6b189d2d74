"""Plans: the BSR rows of composable formats as work items, and the order in which partial states merge.

A plan is deterministic, and good for every layer and every step until the tree's structure changes.  Plain torch takes
each BSR row whole; for our kernels ``attention.gpu.gpu_plan`` splits them to fit one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.bsr import BSR, MaskKind, no_ints
from prefixkit.tree.arrays import Ints, Longs


@dataclass(frozen=True, eq=False)
class Plan:
    """The work of one tree attention.

    Attributes:
        counts: ``[8]`` tile items, decode items, query rows, partial rows, 1 where tile items are taken head by head, 1
            where decode items take by far longer than tile items, zeros.
        tile_items, decode_items: ``[items, 8]`` with columns ``q_begin, q_end, partial_begin, seg_begin, 4 * segments +
            kind, node, begin, end``, where ``kind`` is a :class:`MaskKind`; ``partial_begin = -1``: the item writes the
            output.  The last three repeat the item's first segment.
        segments: ``[segments, 3]`` tokens ``[begin, end)`` of a node; ``end`` may be ``OPEN``.
        merge_indptr: ``[query rows + 1]`` bounds of each query row's partial rows; empty where an item writes the
            output.
        merge_indices: Partial rows in the order of merging, root first.
        limit_begin: ``[items]`` of items of kind LIMIT, tile items first, where ``limits`` has their first query's; -1
            of others.  Empty where there are none, as in plans for our kernels.
        limits: Tokens of its item's KV list that each query of such an item sees.
        partial_limits: ``[partial rows]`` in plans for our kernels, for each partial row of an item of kind LIMIT the
            position of the last token that its query sees; empty where no item is of that kind.
    """

    counts: Ints
    tile_items: Ints
    decode_items: Ints
    segments: Ints
    merge_indptr: Ints
    merge_indices: Ints
    limit_begin: Ints = field(default_factory=no_ints)
    limits: Ints = field(default_factory=no_ints)
    partial_limits: Ints = field(default_factory=no_ints)

    def arrays(self) -> tuple[Ints, ...]:
        """The seven arrays that the kernels take, in their order."""
        items = self.counts, self.tile_items, self.decode_items, self.segments
        return *items, self.merge_indptr, self.merge_indices, self.partial_limits

    @property
    def items(self) -> Ints:
        """``[items, 8]`` all items, tile items first."""
        return np.concatenate((self.tile_items, self.decode_items))

    def kv_tokens_read(self, length: Ints) -> int:
        """Token KVs read in a run over all heads, when node ``n`` holds ``length[n]`` tokens."""
        node, low, high = self.segments.T
        before = np.concatenate(([0], np.cumsum(np.minimum(high, length[node]) - low)))
        begin, count = self.items[:, 3:5].T
        tokens = before[begin + count // 4] - before[begin]
        for item in np.flatnonzero(self.limit_begin >= 0):
            first, (q_begin, q_end) = self.limit_begin[item], self.items[item, :2]
            tokens[item] = min(tokens[item], self.limits[first : first + q_end - q_begin].max())
        return int(tokens.sum())


def make_plan(formats: Sequence[BSR], length: Ints, num_rows: int) -> Plan:
    """Each BSR row of some formats as one item; the same input always gives the same plan.

    Args:
        formats: Block-sparse rows, from ``decompose`` or of a mask of one's own.
        length: ``[nodes]`` visible tokens of each node now; an OPEN segment counts as this long.
        num_rows: Query rows of the step.
    """
    rows = gather_rows(formats, length)
    items = np.zeros((len(rows.q_begin), 8), dtype=np.int64)
    items[:, 0], items[:, 1] = rows.q_begin, rows.q_end
    items[:, 3], items[:, 4] = rows.seg_begin, 4 * rows.seg_count + rows.causal
    plan = finish_plan(items, rows.segments, num_rows, len(items), np.arange(len(items)), (0, 0))
    if not len(rows.limits):
        return plan
    return replace(plan, limit_begin=rows.limit_begin.astype(np.int32), limits=rows.limits)


def finish_plan(
    items: Longs, segments: Longs, num_rows: int, num_tile_items: int, order: Longs, hints: tuple[int, int]
) -> Plan:
    """Number the partial rows of items, which come root first, and list the items in ``order``, tile items first."""
    items[:, 2], merge_indptr, merge_indices, partials = _number_partials(items, num_rows)
    items[:, 5:8] = segments[items[:, 3]]
    ordered = items[order].astype(np.int32)
    counts = np.array([num_tile_items, len(items) - num_tile_items, num_rows, partials, *hints, 0, 0], dtype=np.int32)
    tile_items, decode_items = ordered[:num_tile_items], ordered[num_tile_items:]
    return Plan(counts, tile_items, decode_items, segments.astype(np.int32), merge_indptr, merge_indices)


@dataclass(frozen=True, eq=False)
class BsrRows:
    """All BSR rows of all formats, ancestors first, and a table of their segments with the tokens before each.

    Attributes:
        causal: ``[rows]`` 1 for rows of kind OWN, else 0.
        limit_begin: ``[rows]`` where ``limits`` begins for rows of kind LIMIT, -1 for others.
    """

    q_begin: Longs
    q_end: Longs
    causal: Longs
    seg_begin: Longs
    seg_count: Longs
    segments: Longs
    before: Longs
    limit_begin: Longs
    limits: Ints


def gather_rows(formats: Sequence[BSR], length: Ints) -> BsrRows:
    """The BSR rows of all formats, where node ``n`` has ``length[n]`` tokens.

    Raises:
        ValueError: a format has not one limit for each query of its rows of kind LIMIT.
    """
    none = np.zeros(0, dtype=np.int64)
    q_begin, q_end, kind, node, begin, end = (
        np.concatenate([none, *(getattr(bsr, name) for bsr in formats)])
        for name in ("q_begin", "q_end", "kind", "node", "begin", "end")
    )
    seg_count = np.concatenate([none, *(np.diff(bsr.indptr) for bsr in formats)])
    seg_begin = np.cumsum(seg_count) - seg_count
    before = np.concatenate(([0], np.cumsum(np.minimum(end, length[node]) - begin)))
    causal, limited = (kind == MaskKind.OWN).astype(np.int64), kind == MaskKind.LIMIT
    # In the order of their own nodes, which come last, and of paths' first nodes; a query's partial states then merge
    # root first.
    owner, limit_begin, limits = seg_begin + seg_count - 1, np.full(len(kind), -1), no_ints()
    if limited.any():
        limit_begin, limits = _limits_of(formats, np.where(limited, q_end - q_begin, 0), limited)
        owner = np.where(limited, seg_begin, owner)
    key = 4 * node[owner] + 2 * causal + limited
    if np.any(key[1:] < key[:-1]):
        order = np.argsort(key, kind="stable")
        q_begin, q_end, causal = q_begin[order], q_end[order], causal[order]
        seg_begin, seg_count, limit_begin = seg_begin[order], seg_count[order], limit_begin[order]
    segments = np.stack((node, begin, end), axis=1)
    return BsrRows(q_begin, q_end, causal, seg_begin, seg_count, segments, before, limit_begin, limits)


def _limits_of(formats: Sequence[BSR], queries: Longs, limited: NDArray[np.bool_]) -> tuple[Longs, Ints]:
    """Where the limits of each row begin, -1 where it has none, and all limits; ``queries`` of a row have one each."""
    limits = np.concatenate([no_ints(), *(bsr.limit for bsr in formats)])
    rows = np.cumsum([0, *(len(bsr.kind) for bsr in formats)])
    for bsr, (first, last) in zip(formats, pairwise(rows.tolist()), strict=True):
        if len(bsr.limit) != (wanted := int(queries[first:last].sum())):
            raise ValueError(f"BSR: limit must have one entry for each of {wanted} query rows, got {len(bsr.limit)}")
    if len(limits) and limits.min() < 0:
        raise ValueError(f"BSR: limits must be numbers of tokens of at least 0, got {limits.min()}")
    return np.where(limited, np.cumsum(queries) - queries, -1), limits.astype(np.int32)


def _number_partials(items: Longs, num_rows: int) -> tuple[Longs, Ints, Ints, int]:
    """Give every item its partial rows, and list the partial rows of every query row in item order (root first)."""
    touches = np.bincount(items[:, 0], minlength=num_rows + 1) - np.bincount(items[:, 1], minlength=num_rows + 1)
    shared = np.concatenate(([0], np.cumsum(np.cumsum(touches)[:num_rows] > 1)))
    is_partial = shared[items[:, 1]] > shared[items[:, 0]]
    rows = np.where(is_partial, items[:, 1] - items[:, 0], 0)
    begin = np.cumsum(rows) - rows
    total = int(rows.sum())
    row_of = np.arange(total) - np.repeat(begin - items[:, 0], rows)
    # numpy sorts 16-bit numbers by counting, in linear time.
    by_row = np.argsort(row_of.astype(np.uint16) if num_rows <= 2**16 else row_of, kind="stable")
    indptr = np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=num_rows))))
    return np.where(is_partial, begin, -1), indptr.astype(np.int32), by_row.astype(np.int32), total
