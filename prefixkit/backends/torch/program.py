"""Programs: what the CPU does in one layer of a step, compiled once and run in every layer.

A program depends on numbers only: the work list, the tree's arrays, the positions of the queries.  So programs are found
again by comparing these numbers, all of them.  That costs some 10 us per layer, and no tensor that is written in place, or
freed and replaced by another at its address, can ever meet a stale program.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from prefixkit.attention.variants import Variant
from prefixkit.backends.torch import tuning as cpu_tuning
from prefixkit.backends.torch.batches import Heads, batches
from prefixkit.backends.torch.calls import Call, make_call
from prefixkit.backends.torch.merge import Merge, plan_merge
from prefixkit.backends.torch.pieces import Array, Pieces, Work, cut, detach_long_runs
from prefixkit.ops.checks import check_work

# Programs kept per process.  A model uses one or two per step: one for each variant among its layers.
KEPT = 4

_kept: list[tuple[tuple[object, ...], bytes, Program]] = []
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Program:
    """Kernel calls, and how their results merge into the rows of the output.

    Attributes:
        heads: The heads it computes.
        calls: In order; call ``i`` makes block ``i``.
        merge: From the blocks' rows to the output's.
        folded: Every block has its heads in the order ``(group, kv_heads)``; else blocks are brought to query-head order.
        may_be_empty: A partial state may have seen no key.
    """

    heads: Heads
    calls: tuple[Call, ...]
    merge: Merge
    folded: bool
    may_be_empty: bool


def program_for(
    q_positions: Tensor,
    work: Sequence[Tensor],
    nodes: Sequence[Tensor],
    pool_shape: Sequence[int],
    heads: Heads,
    exact_views: bool,
    key: str,
    variant: Variant,
) -> Program:
    """The program of a step.

    Args:
        q_positions, work, nodes: As the op takes them.
        pool_shape: Of the pages.
        heads: Of the layer.
        exact_views: Keys can be used where they lie; False if they must be converted to float32 first.
        key, variant: The variant.
    """
    arrays = [tensor.numpy() for tensor in (*work, *nodes, q_positions)]
    shape = (tuple(pool_shape), heads, exact_views, key, cpu_tuning.TUNING, tuple([array.shape for array in arrays]))
    numbers = b"".join([array.tobytes() for array in arrays])
    with _lock:
        for entry in _kept:
            if entry[1] == numbers and entry[0] == shape:
                return entry[2]
    check_work(arrays[-1].shape[0], work, nodes)
    listed = Work(pool_shape[1], *[array.astype(np.int64) for array in arrays])
    program = _compile(listed, heads, pool_shape[0], exact_views, variant)
    with _lock:
        _kept.insert(0, (shape, numbers, program))
        del _kept[KEPT:]
    return program


def forget() -> None:
    """Drop all programs; the next call compiles afresh."""
    with _lock:
        _kept.clear()


def _compile(work: Work, heads: Heads, num_pages: int, exact_views: bool, variant: Variant) -> Program:
    changed = variant.score_mod is not None or variant.mask_mod is not None
    pieces = cut(work, variant.reach, cpu_tuning.TUNING.variant_rows if changed else None)
    _check_slots(pieces, num_pages * work.page_size)
    pieces = detach_long_runs(
        pieces,
        shortest=heads.longest_copy,
        longest=_longest(pieces, heads, exact_views, changed),
    )
    calls: list[Call] = []
    block = np.full(len(pieces), -1, dtype=np.int64)
    base = np.zeros(len(pieces), dtype=np.int64)
    for batch in batches(pieces, heads, variant):
        call = make_call(pieces, batch, work.q_positions, heads, variant)
        if call is not None:
            block[batch], base[batch] = len(calls), np.arange(len(batch)) * call.rows
            calls.append(call)
    return Program(
        heads=heads,
        calls=tuple(calls),
        merge=_merge(work, pieces, block, base, np.array([call.batch * call.rows for call in calls], dtype=np.int64)),
        folded=all(call.folded for call in calls),
        may_be_empty=variant.score_mod is not None or any(call.empty is not None for call in calls),
    )


def _check_slots(pieces: Pieces, num_slots: int) -> None:
    low, high = pieces.slot.min(initial=0), (pieces.slot + pieces.count).max(initial=0)
    if low < 0 or high > num_slots:
        raise IndexError(
            f"tree_attention: nodes name slots {low}..{high - 1}, but the pages hold slots 0..{num_slots - 1}"
        )


def _longest(pieces: Pieces, heads: Heads, exact_views: bool, changed: bool) -> Array:
    """Tokens beyond which a dense piece is cut, to bound the memory of copies, scores and masks."""
    most = cpu_tuning.TUNING.call_elements
    longest: Array = np.full(len(pieces), max(1, most // heads.kv_elements))
    if exact_views:
        longest[np.diff(pieces.indptr) == 1] = np.iinfo(np.int64).max
    if changed:
        np.minimum(longest, np.maximum(1, most // (heads.heads * pieces.rows)), out=longest)
    return longest


def _merge(work: Work, pieces: Pieces, block: Array, base: Array, heights: Array) -> Merge:
    """Order each row's partials by the plan's merge order, then by the pieces of an item."""
    kept = np.flatnonzero(block >= 0)
    piece = np.repeat(kept, pieces.rows[kept])
    within = np.arange(len(piece)) - np.repeat(np.cumsum(pieces.rows[kept]) - pieces.rows[kept], pieces.rows[kept])
    row = pieces.row[piece] + within
    q_begin, partial_begin = work.items[pieces.item[piece]][:, [0, 3]].T
    partial = np.where(partial_begin < 0, -1, partial_begin + row - q_begin)
    turn = np.full(int(max(partial.max(initial=-1), work.merge_indices.max(initial=-1))) + 2, -1)
    turn[work.merge_indices] = np.arange(len(work.merge_indices))
    listed = turn[partial[partial >= 0]]
    owner = np.repeat(np.arange(len(work.q_positions)), np.diff(work.merge_indptr))
    assert np.array_equal(owner[listed], row[partial >= 0]), "a partial merges into another query's row"
    assert np.all(listed >= 0), "a partial merges nowhere"
    order = np.lexsort((piece, turn[partial], row))
    piece = piece[order]
    return plan_merge(len(work.q_positions), row[order], block[piece], (base[piece] + within[order]), heights)
