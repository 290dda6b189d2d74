"""Calls: what one run of an attention kernel reads, masks and multiplies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.variants import Variant
from prefixkit.backends.torch.batches import Heads
from prefixkit.backends.torch.pieces import DENSE, MASKED, SQUARE, Array, Pieces
from prefixkit.tree.ragged import ranges


@dataclass(frozen=True, eq=False)
class Scoring:
    """What a call needs to compute its scores in plain torch.

    Attributes:
        q_position: ``[batch, 1, rows, 1]`` int64.
        kv_position: ``[batch, 1, 1, length]`` int64.
        visible: Bool, broadcasts to ``[batch, heads, rows, length]``, or None if everything is.
    """

    q_position: Tensor
    kv_position: Tensor
    visible: Tensor | None


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel call: ``batch`` blocks of ``rows`` queries against ``length`` keys each.

    Attributes:
        batch, rows, length: The block; ragged pieces are padded up to it.
        first_row: First query row, when the call's rows are consecutive; else -1.
        row_index: ``[batch * rows]`` int64 query rows otherwise.
        first_slot: First slot, when the call's keys are one run; else -1.
        slot_index: ``[batch * length]`` int64 slots otherwise.
        causal: Row i of a block sees its keys 0..i.
        folded: Query heads of one KV head are rows of one matrix: rows of the result have heads in the order
            ``(group, kv_heads)`` instead of ``(kv_heads, group)``.
        mask: float32 0 or -inf, broadcasts to the kernel's scores; or None.
        empty: Bool ``[batch * rows, heads or 1]``, True where the mask hides all keys; or None.
        scoring: Set where torch's flash attention does not serve; scores are computed in plain torch then.
    """

    batch: int
    rows: int
    length: int
    first_row: int
    row_index: Tensor | None
    first_slot: int
    slot_index: Tensor | None
    causal: bool
    folded: bool
    mask: Tensor | None = None
    empty: Tensor | None = None
    scoring: Scoring | None = None


def make_call(
    pieces: Pieces, batch: Array, q_positions: Array, heads: Heads, variant: Variant, *, flash: bool, views: bool
) -> Call | None:
    """The call for some pieces of one kind, or None if the variant hides all their keys.

    Args:
        pieces, batch: The pieces, and the numbers of those that the call holds.
        q_positions: ``[T]`` position of each query row.
        heads, variant: What is computed.
        flash: torch's flash attention computes it; else scores are computed in plain torch.
        views: A run of consecutive slots can be read where it lies; else every key is gathered by its slot.
    """
    rows, tokens = pieces.rows[batch], pieces.tokens[batch]
    most, longest = int(rows.max()), int(tokens.max())
    row_grid = pieces.row[batch][:, None] + np.minimum(np.arange(most), rows[:, None] - 1)
    runs = ranges(pieces.indptr[batch], np.diff(pieces.indptr)[batch])
    single_run = views and len(runs) == 1
    kind = int(pieces.kind[batch[0]])
    padded = kind == DENSE and not bool(np.all(tokens == longest))
    visible = torch.from_numpy(np.arange(longest) < tokens[:, None])[:, None, None, :] if padded else None
    scoring = None
    if not flash or variant.mask_mod is not None or kind == MASKED:
        kv_position = _padded(ranges(pieces.position[runs], pieces.count[runs]), tokens, longest)
        scoring = _scoring(q_positions[row_grid], kv_position, visible, kind, heads, variant, flash)
        if scoring.visible is not None and not bool(scoring.visible.any()):
            return None
        visible = scoring.visible
    causal = flash and kind == SQUARE and (scoring is None or visible is None)
    folded = flash and not causal and heads.group > 1 and most < heads.tuning.fold_rows
    consecutive = bool(np.all(np.diff(row_grid.reshape(-1)) == 1))
    mask = empty = None
    if flash and visible is not None:
        mask = _mask(visible, most, heads, folded)
        empty = None if scoring is None else _empty(visible, most, heads, folded)  # padding alone empties no row
    slots = None
    if not single_run:
        slots = _padded(ranges(pieces.slot[runs], pieces.count[runs]), tokens, longest).reshape(-1)
    return Call(
        batch=len(batch),
        rows=most,
        length=longest,
        first_row=int(row_grid[0, 0]) if consecutive else -1,
        row_index=None if consecutive else torch.from_numpy(row_grid.reshape(-1)),
        first_slot=int(pieces.slot[runs[0]]) if single_run else -1,
        slot_index=None if slots is None else torch.from_numpy(slots),
        causal=causal,
        folded=folded,
        mask=mask,
        empty=empty,
        scoring=None if flash else scoring,
    )


def _padded(values: Array, tokens: Array, longest: int) -> Array:
    """``[batch, longest]``: ragged rows laid end to end in ``values``, each padded with its last (real) element."""
    begin = np.cumsum(tokens) - tokens
    grid: Array = values[begin[:, None] + np.minimum(np.arange(longest), tokens[:, None] - 1)]
    return grid


def _scoring(
    q_position: Array,
    kv_position: Array,
    visible: Tensor | None,
    kind: int,
    heads: Heads,
    variant: Variant,
    flash: bool,
) -> Scoring:
    """Positions of a call's rows and keys, and who sees whom.

    A SQUARE whose mask hides nothing more keeps ``visible`` None if the kernel can do the triangle itself.
    """
    q = torch.from_numpy(q_position)[:, None, :, None]
    kv = torch.from_numpy(kv_position)[:, None, None, :]
    if kind == SQUARE:
        base = torch.ones(q.shape[2], kv.shape[3], dtype=torch.bool).tril()[None, None]
    elif kind == MASKED:
        base = kv <= q
    else:
        base = torch.ones(1, 1, 1, 1, dtype=torch.bool) if visible is None else visible
    shown = base
    if variant.mask_mod is not None:
        allowed = variant.mask_mod(q, kv, heads.numbers())
        shown = allowed & base
        shown = shown.expand(len(q), shown.shape[1], q.shape[2], kv.shape[3])
        if torch.equal(shown, base.expand_as(shown)):
            shown = base
    if shown is base and kind == DENSE:
        return Scoring(q, kv, visible)
    if shown is base and kind == SQUARE and flash:
        return Scoring(q, kv, None)
    return Scoring(q, kv, shown)


def _mask(visible: Tensor, rows: int, heads: Heads, folded: bool) -> Tensor:
    """Additive mask of shape ``[batch, 1 or heads or kv_heads, 1 or rows or rows * group, length]``."""
    if folded and visible.shape[1:3] != (1, 1):
        visible = _fold(visible, rows, heads)
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)


def _fold(visible: Tensor, rows: int, heads: Heads) -> Tensor:
    """``[batch, heads or 1, rows, length]`` to ``[batch, kv_heads or 1, rows * group, length]``."""
    batch, per_head, _, length = visible.shape
    if per_head == 1:
        return visible.repeat_interleave(heads.group, dim=2)
    grouped = visible.view(batch, heads.kv_heads, heads.group, rows, length).transpose(2, 3)
    return grouped.reshape(batch, heads.kv_heads, rows * heads.group, length)


def _empty(visible: Tensor, rows: int, heads: Heads, folded: bool) -> Tensor | None:
    """``[batch * rows, heads or 1]`` True where no key is visible, or None if there is no such row."""
    empty = ~visible.any(dim=-1)
    if not bool(empty.any()):
        return None
    batch, per_head = empty.shape[:2]
    empty = empty.expand(batch, per_head, rows)
    if folded and per_head > 1:
        empty = empty.view(batch, heads.kv_heads, heads.group, rows).transpose(1, 2)
    return empty.reshape(batch, per_head, rows).transpose(1, 2).reshape(batch * rows, per_head)
