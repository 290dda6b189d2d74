"""Plans for executors that cut the work themselves: block-sparse rows as work items, and the order in which partials merge.

A plan is a value: deterministic, and good for every layer and every step until the tree's structure changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixkit.attention.ancestry import Longs
from prefixkit.attention.bsr import BSR
from prefixkit.tree.snapshot import Ints

ITEM_COLUMNS = ("q_begin", "q_end", "causal", "partial_begin")


@dataclass(frozen=True, eq=False)
class Plan:
    """Work items and merges of one tree attention.

    Attributes:
        items: ``[items, 4]`` with columns :data:`ITEM_COLUMNS`.  An item reads its segments for queries ``[q_begin, q_end)``
            and writes their states to rows ``partial_begin...`` of the partial buffer; ``partial_begin = -1`` means that no
            other item touches these queries and the item writes the output itself.
        segment_indptr: ``[items + 1]`` bounds of each item's segments.
        segments: ``[segments, 3]`` tokens ``[begin, end)`` of a node, as ``(node, begin, end)``; ``end`` may be ``OPEN``.
        merge_indptr: ``[rows + 1]`` bounds of each query row's partials; empty where an item writes the output itself.
        merge_indices: Partial rows in the order of merging, root first.
    """

    items: Ints
    segment_indptr: Ints
    segments: Ints
    merge_indptr: Ints
    merge_indices: Ints

    @property
    def num_rows(self) -> int:
        return len(self.merge_indptr) - 1

    def arrays(self) -> tuple[Ints, ...]:
        """The five arrays that the ops take as ``work``, in their order."""
        return self.items, self.segment_indptr, self.segments, self.merge_indptr, self.merge_indices

    def kv_tokens_read(self, length: Ints) -> int:
        """Token KVs read in a run over all heads, when node ``n`` holds ``length[n]`` tokens."""
        node, begin, end = self.segments.T
        return int((np.minimum(end, length[node]) - begin).sum())


def make_plan(rows: BSR, num_rows: int) -> Plan:
    """One work item for each block-sparse row.

    Args:
        rows: From ``decompose``; ancestors before descendants.
        num_rows: Query rows of the step.

    Returns:
        The plan; the same input always gives the same plan.
    """
    spans = np.stack((rows.q_begin, rows.q_end), axis=1).astype(np.int64)
    partial_begin, merge_indptr, merge_indices, _ = number_partials(spans, num_rows)
    return Plan(
        items=np.column_stack((spans, rows.causal, partial_begin)).astype(np.int32),
        segment_indptr=rows.indptr,
        segments=np.stack((rows.node, rows.begin, rows.end), axis=1),
        merge_indptr=merge_indptr,
        merge_indices=merge_indices,
    )


def number_partials(items: Longs, num_rows: int) -> tuple[Longs, Ints, Ints, int]:
    """Give every item its rows of the partial buffer, and every query row its partials in item order (root first).

    Args:
        items: ``[items, 2 or more]`` whose first columns are q_begin and q_end.
        num_rows: Query rows of the step.

    Returns:
        ``partial_begin [items]``, -1 for an item that has its rows for itself; ``merge_indptr [rows + 1]`` and
        ``merge_indices``, as plans have them; the number of partial rows.
    """
    touches = np.bincount(items[:, 0], minlength=num_rows + 1) - np.bincount(items[:, 1], minlength=num_rows + 1)
    shared = np.concatenate(([0], np.cumsum(np.cumsum(touches)[:num_rows] > 1)))
    leaves = shared[items[:, 1]] > shared[items[:, 0]]
    rows = np.where(leaves, items[:, 1] - items[:, 0], 0)
    begin = np.cumsum(rows) - rows
    total = int(rows.sum())
    row_of = np.arange(total) - np.repeat(begin - items[:, 0], rows)
    # numpy sorts 16-bit numbers by counting, in linear time.
    by_row = np.argsort(row_of.astype(np.uint16) if num_rows <= 2**16 else row_of, kind="stable")
    indptr = np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=num_rows))))
    return np.where(leaves, begin, -1), indptr.astype(np.int32), by_row.astype(np.int32), total
