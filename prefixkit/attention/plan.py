"""Plans: block-sparse rows cut into balanced work items, with the order in which their partial states merge.

After FlashInfer (Algorithm 1): KV is cut into chunks of at most an even share of the work, and the longest chunk goes to the
least loaded worker.  A plan is a value: deterministic, printable, and good for every layer and every step until the tree's
structure changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prefixkit.attention.formats import BSR, OPEN
from prefixkit.tree.snapshot import Ints

ITEM_COLUMNS = ("q_begin", "q_end", "causal", "partial_begin", "kv_head", "worker")


@dataclass(frozen=True, eq=False)
class Plan:
    """Work items and merges of one tree attention.

    Attributes:
        items: ``[items, 6]`` with columns :data:`ITEM_COLUMNS`.  An item reads its segments for queries ``[q_begin, q_end)``
            and writes their states to rows ``partial_begin...`` of the partial buffer; ``partial_begin = -1`` means that no
            other item touches these queries and the item writes the output itself.  ``kv_head = -1`` means all heads.
            Items are grouped by worker, each worker's longest first.
        segment_indptr: ``[items + 1]`` bounds of each item's segments.
        segments: ``[segments, 3]`` tokens ``[begin, end)`` of a node, as ``(node, begin, end)``; ``end`` may be ``OPEN``.
        merge_indptr: ``[rows + 1]`` bounds of each query row's partials; empty where an item writes the output itself.
        merge_indices: Partial rows in the order of merging, root first.
        num_partial_rows: Rows of the partial buffer.
        num_workers: How many workers the items are dealt to.
        worker_cost: ``[workers]`` KV tokens x tiles of each worker, as planned.
    """

    items: Ints
    segment_indptr: Ints
    segments: Ints
    merge_indptr: Ints
    merge_indices: Ints
    num_partial_rows: int
    num_workers: int
    worker_cost: Ints

    @property
    def num_rows(self) -> int:
        return len(self.merge_indptr) - 1

    def arrays(self) -> tuple[Ints, ...]:
        """The five arrays that the ops take as ``work``, in their order."""
        return self.items, self.segment_indptr, self.segments, self.merge_indptr, self.merge_indices

    def kv_tokens_read(self, length: Ints) -> int:
        """Token KVs read in a run over all heads, when node ``n`` holds ``length[n]`` tokens."""
        node, begin, end = self.segments.T
        tokens = np.minimum(end, length[node]) - begin
        per_item = np.add.reduceat(tokens, self.segment_indptr[:-1]) if len(tokens) else tokens
        all_heads = self.items[:, 4] <= 0  # with heads dealt apart, kv_head 0 stands for its siblings
        return int(per_item[all_heads].sum())

    def __str__(self) -> str:
        load = f"load {self.worker_cost.min()} to {self.worker_cost.max()}"
        size = f"{len(self.items)} items, {self.num_rows} rows, {self.num_partial_rows} partial rows"
        lines = [f"Plan: {size}, {self.num_workers} workers ({load})"]
        for item, (q_begin, q_end, causal, partial, head, worker) in enumerate(self.items.tolist()):
            part = slice(int(self.segment_indptr[item]), int(self.segment_indptr[item + 1]))
            reads = " ".join(
                f"{node}[{begin}:{'' if end == OPEN else end}]" for node, begin, end in self.segments[part].tolist()
            )
            goes = "output" if partial < 0 else f"partials {partial}..{partial + q_end - q_begin - 1}"
            kind = "causal" if causal else "dense"
            heads = "" if head < 0 else f" head {head}"
            lines.append(f"  worker {worker}{heads}: queries {q_begin}..{q_end - 1} {kind} over {reads} -> {goes}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Item:
    q_begin: int
    q_end: int
    causal: bool
    segments: list[tuple[int, int, int]]
    tokens: int


def make_plan(
    formats: Sequence[BSR],
    length: Ints,
    num_rows: int,
    *,
    group: int = 1,
    num_workers: int = 1,
    kv_heads: int | None = None,
    max_tile: int | None = None,
    min_chunk: int = 256,
) -> Plan:
    """Cut formats into work items and deal them to workers.

    Args:
        formats: Block-sparse rows from ``decompose``.
        length: ``[nodes]`` visible tokens of each node now; an OPEN segment counts as this long.
        num_rows: Query rows of the step.
        group: Query heads per KV head: a tile of ``tile_rows`` query heads holds ``tile_rows // group`` queries.
        num_workers: Blocks or threads that share the work.
        kv_heads: Deal each KV head apart (a GPU block works on one head); None for items over all heads.
        max_tile: Cut queries into tiles of at most this many query heads; None leaves them whole.
        min_chunk: KV tokens below which a chunk is not cut further, for every cut costs a partial state.

    Returns:
        The plan; the same input always gives the same plan.
    """
    rows = [row for bsr in formats for row in _tiles(bsr, length, group, max_tile)]
    total = sum(row.tokens for row in rows) * (kv_heads or 1)
    chunk = max(min_chunk, -(-total // num_workers)) if rows else min_chunk
    items = sorted(
        (item for row in rows for item in _chunks(row, length, chunk)), key=lambda i: (i.segments[0][0], i.q_begin)
    )
    partial_begin, merge_indptr, merge_indices, num_partials = _number_partials(items, num_rows)
    order, worker, load = _deal(items, num_workers, kv_heads)
    packed = [items[i] for i, _ in order]
    return Plan(
        items=np.array(
            [
                (p.q_begin, p.q_end, int(p.causal), partial_begin[i], head, w)
                for p, (i, head), w in zip(packed, order, worker, strict=True)
            ],
            dtype=np.int32,
        ).reshape(-1, len(ITEM_COLUMNS)),
        segment_indptr=np.cumsum([0, *(len(p.segments) for p in packed)]).astype(np.int32),
        segments=np.array([s for p in packed for s in p.segments], dtype=np.int32).reshape(-1, 3),
        merge_indptr=merge_indptr,
        merge_indices=merge_indices,
        num_partial_rows=num_partials,
        num_workers=num_workers,
        worker_cost=np.array(load, dtype=np.int32),
    )


def _tiles(bsr: BSR, length: Ints, group: int, max_tile: int | None) -> Iterator[_Item]:
    """The rows of a format, cut so that none has more queries than a tile holds."""
    for row in range(bsr.num_rows):
        q_begin, q_end = int(bsr.q_begin[row]), int(bsr.q_end[row])
        segments = bsr.row_segments(row)
        tokens = sum(min(end, int(length[node])) - begin for node, begin, end in segments)
        step = q_end - q_begin if max_tile is None else max(1, min(bsr.tile_rows, max_tile) // group)
        for tile in range(q_begin, q_end, step):
            yield _Item(tile, min(tile + step, q_end), bool(bsr.causal[row]), segments, tokens)


def _chunks(row: _Item, length: Ints, chunk: int) -> Iterator[_Item]:
    """A row's KV in even pieces of at most ``chunk`` tokens; only the last keeps an OPEN end."""
    pieces = max(1, -(-row.tokens // chunk))
    if pieces == 1:
        yield row
        return
    bounds = [row.tokens * i // pieces for i in range(pieces + 1)]
    for piece in range(pieces):
        low, high = bounds[piece], bounds[piece + 1]
        taken, at = [], 0
        for node, begin, end in row.segments:
            size = min(end, int(length[node])) - begin
            a, b = max(low - at, 0), min(high - at, size)
            if a < b:
                taken.append((node, begin + a, end if end == OPEN and piece == pieces - 1 else begin + b))
            at += size
        yield _Item(row.q_begin, row.q_end, row.causal, taken, high - low)


def _number_partials(items: list[_Item], num_rows: int) -> tuple[list[int], Ints, Ints, int]:
    """Give every item its rows of the partial buffer, and every query row its partials in item order (root first)."""
    touches = np.zeros(num_rows + 1, dtype=np.int64)
    for item in items:
        touches[item.q_begin] += 1
        touches[item.q_end] -= 1
    count = np.cumsum(touches)[:num_rows]
    partial_begin, next_row = [], 0
    row_parts, partial_parts = [], []
    for item in items:
        queries = np.arange(item.q_begin, item.q_end)
        if np.all(count[queries] == 1):
            partial_begin.append(-1)
            continue
        partial_begin.append(next_row)
        row_parts.append(queries)
        partial_parts.append(next_row + queries - item.q_begin)
        next_row += len(queries)
    if not row_parts:
        return partial_begin, np.zeros(num_rows + 1, dtype=np.int32), np.zeros(0, dtype=np.int32), 0
    rows, partials = np.concatenate(row_parts), np.concatenate(partial_parts)
    by_row = np.argsort(rows, kind="stable")
    indptr = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=num_rows))))
    return partial_begin, indptr.astype(np.int32), partials[by_row].astype(np.int32), next_row


def _deal(
    items: list[_Item], num_workers: int, kv_heads: int | None
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Longest item first to the least loaded worker; returns (item, head) pairs by worker, their workers, and the loads."""
    heads = range(kv_heads) if kv_heads else (-1,)
    longest_first = sorted(range(len(items)), key=lambda i: -items[i].tokens)
    loads = [(0, worker) for worker in range(num_workers)]
    hands: list[list[tuple[int, int]]] = [[] for _ in range(num_workers)]
    for i in longest_first:
        for head in heads:
            load, worker = heapq.heappop(loads)
            hands[worker].append((i, head))
            heapq.heappush(loads, (load + items[i].tokens, worker))
    final = [0] * num_workers
    for load, worker in loads:
        final[worker] = load
    order = [pair for hand in hands for pair in hand]
    return order, [worker for worker, hand in enumerate(hands) for _ in hand], final
