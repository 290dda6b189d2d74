"""Checked mode: with ``PREFIXKIT_CHECK=1`` the ops read their integers back and refuse those out of range.

A kernel trusts its plan: a wrong page number reads another sequence's keys, or no memory at all.  Checking costs a copy
from the GPU and a wait, so it is for tests and for finding errors; a graph capture goes unchecked.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from prefixkit.attention.bsr import OPEN, MaskKind
from prefixkit.attention.gpu.capacity import OVERFLOW
from prefixkit.attention.plan import KINDS
from prefixkit.ops.arguments import BadDevice, BadShape, capturing, check_packed, check_positions
from prefixkit.tree.arrays import Longs, ranges


class BadPlan(ValueError):
    """A plan's work and nodes do not fit each other, or these pages and queries."""


def check_packed_numbers(rows: int, pages: Sequence[int], work: Sequence[Tensor], nodes: Sequence[Tensor]) -> None:
    """BadPlan: an item, segment, node or page number is out of range.  ``pages``: (number of pages, page size)."""
    if capturing(work[0]):
        return
    op = "tree_attention"
    counts, tile_items, decode_items, segments, merge_indptr, merge_indices, limits = (
        t.cpu().numpy().astype(np.int64) for t in work
    )
    length = _check_tree(op, pages, [t.cpu().numpy().astype(np.int64) for t in nodes])
    if counts[OVERFLOW]:
        raise BadPlan(f"{op}: the plan did not fit its tensors, and is empty; give its planner more capacity")
    if counts[0] > len(tile_items) or counts[1] > len(decode_items) or counts[2] != rows or counts[:4].min() < 0:
        raise BadPlan(
            f"{op}: counts say {counts[0]} tile items, {counts[1]} decode items, {counts[2]} rows; the lists hold "
            f"{len(tile_items)} and {len(decode_items)}, and q has {rows} rows"
        )
    items = np.concatenate((tile_items[: counts[0]], decode_items[: counts[1]]))
    q_begin, q_end, partial, first = items.T[:4]
    count = items[:, 4] // KINDS
    if len(items) and (q_begin.min() < 0 or q_end.max() > rows or np.any(q_begin > q_end)):
        raise BadPlan(f"{op}: items take queries {q_begin.min()}..{q_end.max()}, but q has {rows} rows")
    if len(items) and (first.min() < 0 or (first + count).max() > len(segments) or count.min() < 1):
        raise BadPlan(
            f"{op}: items take segments {first.min()}..{(first + count).max()}, but there are {len(segments)}"
        )
    used = segments[ranges(first, count)] if len(items) else segments[:0]
    _check_segments(op, np.concatenate((used, items[:, 5:8])), length)
    written = partial >= 0
    partials = int((partial[written] + q_end[written] - q_begin[written]).max(initial=0))
    if partials > counts[3]:
        raise BadPlan(f"{op}: items write {partials} partial rows, but counts say {counts[3]}")
    _check_limits(op, items[items[:, 4] % KINDS == MaskKind.LIMIT], limits)
    _partition(op, "merge_indptr", merge_indptr[: rows + 1], len(merge_indices), "merge_indices")
    merged = merge_indices[: merge_indptr[rows]]
    if len(merged) and (merged.min() < 0 or merged.max() >= partials):
        raise BadPlan(f"{op}: merge_indices must be 0..{partials - 1}, got {merged.min()}..{merged.max()}")


def _check_tree(op: str, pages: Sequence[int], nodes: Sequence[Longs]) -> Longs:
    """The nodes' lengths, once their pages are known to exist and to hold that many tokens."""
    _, length, page_indptr, page, first_slot = nodes
    num_pages, page_size = pages
    used = page[: page_indptr[-1]]
    if len(used) and (used.min() < 0 or used.max() >= num_pages):
        raise BadPlan(f"{op}: nodes.pages must be 0..{num_pages - 1}, got {used.min()}..{used.max()}: of another pool?")
    _partition(op, "nodes.page_indptr", page_indptr, len(page), "pages")
    capacity = np.diff(page_indptr) * page_size - first_slot
    short = np.flatnonzero((length > 0) & (length > capacity))
    if len(short):
        node = int(short[0])
        raise BadPlan(f"{op}: node {node} has {length[node]} tokens, but its pages hold {capacity[node]}")
    return length


def _check_segments(op: str, segments: Longs, length: Longs) -> None:
    node, begin, end = segments.T
    if len(node) and (node.min() < 0 or node.max() >= len(length)):
        raise BadPlan(
            f"{op}: segments name nodes {node.min()}..{node.max()}, but the tree has {len(length)}: of another tree?"
        )
    wrong = (begin < 0) | ((end != OPEN) & (end > length[node]))
    if np.any(wrong):
        n, b, e = segments[np.argmax(wrong)]
        raise BadPlan(f"{op}: a segment reads tokens {b}..{e} of node {n}, which has {length[n]}: of an older tree?")


def _check_limits(op: str, items: Longs, limits: Longs) -> None:
    """BadPlan unless items of kind LIMIT have ascending limits at the partial rows that they write."""
    if not len(items):
        return
    q_begin, q_end, partial = items.T[:3]
    end = int((partial + q_end - q_begin).max())
    if partial.min() < 0 or end > len(limits):
        raise BadPlan(f"{op}: items read limits of partial rows {partial.min()}..{end}, but there are {len(limits)}")
    of = np.repeat(np.arange(len(items)), q_end - q_begin)
    read = limits[ranges(partial, q_end - q_begin)]
    if np.any((read[1:] < read[:-1]) & (of[1:] == of[:-1])):
        raise BadPlan(f"{op}: the limits of an item descend; those of a row must ascend with its queries")


def _partition(op: str, name: str, bounds: Longs, count: int, what: str) -> None:
    # Buffers of a captured graph are larger than their contents, so bounds may end early.
    if bounds[0] != 0 or bounds[-1] > count or np.any(np.diff(bounds) < 0):
        raise BadPlan(f"{op}: {name} must rise from 0 to at most {count} {what}, got {bounds[:6].tolist()}...")


class CheckedPlan(threading.local):
    """The plan of a thread's last call: its tensors' identities, their addresses, and the tensors themselves."""

    # The tensors are referenced, so that no other tensor gets their ids.
    last: tuple[tuple[object, ...], tuple[int, ...], tuple[Tensor, ...]] = ((), (), ())

    def check(self, q: Tensor, q_positions: Tensor, work: Sequence[Tensor], nodes: Sequence[Tensor]) -> tuple[int, ...]:
        """Addresses of work and nodes, checked once for all layers."""
        ids = (q.shape[0], q.device, id(q_positions), *map(id, work), *map(id, nodes))
        if ids != self.last[0]:
            check_packed(q.shape[0], work, nodes)
            tensors = (q_positions, *work, *nodes)
            if work[0].device != q.device:
                raise BadDevice(
                    f"tree_attention: the plan is on {work[0].device}, but q is on {q.device}; move it with .to()"
                )
            check_positions(q, q_positions)
            if not all(tensor.is_contiguous() for tensor in tensors):
                raise BadShape("tree_attention: q_positions, work and nodes must be contiguous; use .contiguous()")
            self.last = ids, tuple(tensor.data_ptr() for tensor in (*work, *nodes)), tensors
        return self.last[1]
