"""Programs: the kernel calls of one layer of a step, and how their results merge; made from a plan, run in every layer."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.variants import Variant
from prefixkit.backends.torch.batches import Heads, batches
from prefixkit.backends.torch.calls import Call, make_call
from prefixkit.backends.torch.merge import Merge, plan_merge
from prefixkit.backends.torch.pieces import Array, Pieces, Work, cut, detach_long_runs


@dataclass(frozen=True, eq=False)
class Program:
    """Kernel calls, and how their results merge into the rows of the output.

    Attributes:
        heads: The heads that it computes.
        calls: In order; call ``i`` makes block ``i``.
        merge: From the blocks' rows to the output's.
        folded: Every block has its heads in the order ``(group, kv_heads)``; else blocks are brought to query-head order.
        may_be_empty: A partial state may have seen no key.
        on_cpu: Made for a CPU: keys lie in token-major pages and count as float32.  Else pages have any layout, and keys
            are gathered in their own dtype.
    """

    heads: Heads
    calls: tuple[Call, ...]
    merge: Merge
    folded: bool
    may_be_empty: bool
    on_cpu: bool

    def to(self, device: torch.device) -> Program:
        """The program with its tensors on a device."""
        return replace(self, calls=_moved(self.calls, device), merge=_moved(self.merge, device))


def _moved(part: Any, device: torch.device) -> Any:
    """A part of a program with all tensors in it on a device."""
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, tuple):
        return tuple(_moved(each, device) for each in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: _moved(getattr(part, field.name), device) for field in fields(part)})
    return part


def compile_program(
    work: Work, num_pages: int, heads: Heads, variant: Variant, *, exact_views: bool, flash: bool
) -> Program:
    """The program of a step's work for one pool, one set of heads and one variant.

    Args:
        work: The plan, and the tree that it is for.
        num_pages: Pages of the pool.
        heads: The heads of the layer.
        variant: The attention variant.
        exact_views: Keys can be used where they lie; else they are copied, or converted to float32, first.
        flash: The program is for a CPU: torch's flash attention serves, where the variant leaves scores alone.  Else it
            is for plain torch on a GPU, and runs on tensors of any device.

    Raises:
        IndexError: a node names a slot that the pool does not have.
    """
    by_flash = flash and variant.score_mod is None
    scored = not by_flash or variant.mask_mod is not None
    pieces = cut(work, variant.reach, heads.tuning.scored_rows if scored else None)
    _check_slots(pieces, num_pages * work.page_size)
    pieces = detach_long_runs(
        pieces,
        shortest=heads.longest_copy if flash else np.iinfo(np.int64).max,
        longest=_longest(pieces, heads, exact_views, scored),
    )
    calls: list[Call] = []
    block = np.full(len(pieces), -1, dtype=np.int64)
    base = np.zeros(len(pieces), dtype=np.int64)
    for batch in batches(pieces, heads, scored):
        call = make_call(pieces, batch, work.q_positions, heads, variant, flash=by_flash, views=flash)
        if call is not None:
            block[batch], base[batch] = len(calls), np.arange(len(batch)) * call.rows
            calls.append(call)
    return Program(
        heads=heads,
        calls=tuple(calls),
        merge=_merge(work, pieces, block, base, np.array([call.batch * call.rows for call in calls], dtype=np.int64)),
        folded=all(call.folded for call in calls),
        may_be_empty=not by_flash or any(call.empty is not None for call in calls),
        on_cpu=flash,
    )


def _check_slots(pieces: Pieces, num_slots: int) -> None:
    low, high = pieces.slot.min(initial=0), (pieces.slot + pieces.count).max(initial=0)
    if low < 0 or high > num_slots:
        raise IndexError(
            f"tree_attention: nodes name slots {low}..{high - 1}, but the pages hold slots 0..{num_slots - 1}"
        )


def _longest(pieces: Pieces, heads: Heads, exact_views: bool, scored: bool) -> Array:
    """Tokens beyond which a dense piece is cut, to bound the memory of copies, scores and masks."""
    most = heads.tuning.call_elements
    longest: Array = np.full(len(pieces), max(1, most // heads.kv_elements))
    if exact_views:
        longest[np.diff(pieces.indptr) == 1] = np.iinfo(np.int64).max
    if scored:
        np.minimum(longest, np.maximum(1, most // (heads.heads * pieces.rows)), out=longest)
    return longest


def _merge(work: Work, pieces: Pieces, block: Array, base: Array, heights: Array) -> Merge:
    """Order each row's partials by the plan's merge order, then by the pieces of an item."""
    kept = np.flatnonzero(block >= 0)
    piece = np.repeat(kept, pieces.rows[kept])
    within = np.arange(len(piece)) - np.repeat(np.cumsum(pieces.rows[kept]) - pieces.rows[kept], pieces.rows[kept])
    row = pieces.row[piece] + within
    item = pieces.item[piece]
    partial_begin = work.partial_begin[item]
    partial = np.where(partial_begin < 0, -1, partial_begin + row - work.q_begin[item])
    turn = np.full(int(max(partial.max(initial=-1), work.merge_indices.max(initial=-1))) + 2, -1)
    turn[work.merge_indices] = np.arange(len(work.merge_indices))
    listed = turn[partial[partial >= 0]]
    owner = np.repeat(np.arange(len(work.q_positions)), np.diff(work.merge_indptr))
    assert np.array_equal(owner[listed], row[partial >= 0]), "a partial merges into another query's row"
    assert np.all(listed >= 0), "a partial merges nowhere"
    order = np.lexsort((piece, turn[partial], row))
    piece = piece[order]
    return plan_merge(len(work.q_positions), row[order], block[piece], (base[piece] + within[order]), heights)
