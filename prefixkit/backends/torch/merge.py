"""Merging partial states, row by row, in a fixed order, with a handful of torch calls for all rows.

Rows are sorted by how many partials they have, most first.  Level ``k`` holds the ``k``-th partial of every row that has so
many; it concerns the first rows only, so a level is one vectorised operation and a fixed order is kept for every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.state import State
from prefixkit.backends.torch.pieces import Array


@dataclass(frozen=True, eq=False)
class Level:
    """One partial for each of the first ``rows`` rows.

    Attributes:
        rows: How many rows have it.
        block: The block that holds all of them, or -1 for the concatenation of ``Merge.joined``.
        first: Where they begin, when they are consecutive; else -1.
        index: ``[rows]`` int64 where they are otherwise.
    """

    rows: int
    block: int
    first: int
    index: Tensor | None


@dataclass(frozen=True, eq=False)
class Merge:
    """How rows of some blocks merge into rows of a result.

    Attributes:
        num_rows: Rows of the result; those without partials come out empty.
        levels: See the top of this file.
        joined: Blocks that some level needs concatenated.
        place: ``[num_rows]`` int64 where each row's state is once sorted, or None for rows in order, none empty.
        filled: Rows with at least one partial.
    """

    num_rows: int
    levels: tuple[Level, ...]
    joined: tuple[int, ...]
    place: Tensor | None
    filled: int


def plan_merge(num_rows: int, row: Array, block: Array, index: Array, heights: Array) -> Merge:
    """Plan the merge of partial ``i`` = row ``index[i]`` of block ``block[i]`` into row ``row[i]``, in order of ``i``.

    ``heights`` is ``[blocks]``, the rows of each block.
    """
    by_row = np.argsort(row, kind="stable")
    count = np.bincount(row, minlength=num_rows)
    begin = np.cumsum(count) - count
    sorted_rows = np.argsort(-count, kind="stable")
    in_order = bool(np.all(count == count[0])) and bool(count[0]) if num_rows else True
    partials = [
        by_row[begin[rows] + level]
        for level in range(int(count.max(initial=0)))
        for rows in (sorted_rows[count[sorted_rows] > level],)
    ]
    spread = [block[part] for part in partials if np.any(block[part] != block[part[0]])]
    joined = np.unique(np.concatenate(spread)) if spread else np.zeros(0, dtype=np.int64)
    offset = np.zeros_like(heights)
    offset[joined] = np.cumsum(heights[joined]) - heights[joined]
    place = np.empty(num_rows, dtype=np.int64)
    place[sorted_rows] = np.arange(num_rows)
    return Merge(
        num_rows=num_rows,
        levels=tuple(_level(block[part], index[part], offset) for part in partials),
        joined=tuple(joined.tolist()),
        place=None if in_order else torch.from_numpy(place),
        filled=int(np.count_nonzero(count)),
    )


def _level(block: Array, index: Array, offset: Array) -> Level:
    alone = bool(np.all(block == block[0]))
    where = index if alone else offset[block] + index
    consecutive = bool(np.all(np.diff(where) == 1))
    return Level(
        rows=len(where),
        block=int(block[0]) if alone else -1,
        first=int(where[0]) if consecutive else -1,
        index=None if consecutive else torch.from_numpy(where),
    )


def run_merge(merge: Merge, blocks: Sequence[State], may_be_empty: bool, sinks: Tensor | None = None) -> State:
    """Merge as planned.

    Args:
        merge: The plan.
        blocks: The partial states.
        may_be_empty: Whether a partial can have ``lse = -inf``.
        sinks: ``[heads]`` float32 logits that join every row's denominator, heads as in the blocks; or None.
    """
    if not merge.levels:
        return _with_empty_rows(None, merge.num_rows, blocks, sinks)
    joined = None
    if merge.joined:
        joined = State(
            torch.cat([blocks[block].out for block in merge.joined]),
            torch.cat([blocks[block].lse for block in merge.joined]),
        )
    parts = [_partials(level, blocks, joined) for level in merge.levels]
    merged = parts[0] if len(parts) == 1 and sinks is None else _merge_parts(parts, may_be_empty, sinks)
    if merge.place is None:
        return merged
    if merge.filled < merge.num_rows:
        merged = _with_empty_rows(merged, merge.num_rows, blocks, sinks)
    return State(merged.out.index_select(0, merge.place), merged.lse.index_select(0, merge.place))


def _partials(level: Level, blocks: Sequence[State], joined: State | None) -> State:
    source = blocks[level.block] if joined is None or level.block >= 0 else joined
    if level.index is not None:
        return State(source.out.index_select(0, level.index), source.lse.index_select(0, level.index))
    if level.first == 0 and level.rows == source.lse.shape[0]:
        return source
    return State(source.out.narrow(0, level.first, level.rows), source.lse.narrow(0, level.first, level.rows))


def _merge_parts(parts: Sequence[State], may_be_empty: bool, sinks: Tensor | None) -> State:
    """Merge parts, of which each concerns the first rows only.

    A row's weights are divided by their own sum, not by the exponential of its rounded log-sum-exp, so they add up to 1.
    Sinks join the same sum, for a log-sum-exp that is rounded once more is off by once more half a unit in its last place.
    """
    top = parts[0].lse.clone() if sinks is None else torch.maximum(parts[0].lse, sinks)
    for part in parts[1:]:
        head = _first(top, part.lse.shape[0])
        torch.maximum(head, part.lse, out=head)
    if may_be_empty:
        top.masked_fill_(top == -math.inf, 0.0)  # -inf minus -inf would be NaN
    weights = [torch.sub(part.lse, _first(top, part.lse.shape[0])).exp_() for part in parts]
    total = weights[0].clone()
    for weight in weights[1:]:
        _first(total, weight.shape[0]).add_(weight)
    if sinks is not None:
        total.add_(torch.exp(sinks - top))
    lse = top.add_(total.log())
    if may_be_empty:
        total.masked_fill_(total == 0, 1.0)
    out = parts[0].out * weights[0].div_(total).unsqueeze(-1)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        rows = weight.shape[0]
        _first(out, rows).addcmul_(part.out, weight.div_(_first(total, rows)).unsqueeze(-1))
    return State(out, lse)


def _first(tensor: Tensor, rows: int) -> Tensor:
    return tensor if rows == tensor.shape[0] else tensor.narrow(0, 0, rows)


def _with_empty_rows(state: State | None, rows: int, like: Sequence[State], sinks: Tensor | None) -> State:
    """The state with empty rows appended, up to ``rows``."""
    assert state is not None or like, "no block to take the shape of an empty state from"
    shape = (like[0] if state is None else state).out.shape
    device = like[0].out.device if state is None else state.out.device
    out = torch.zeros(rows, *shape[1:], device=device)
    lse = torch.full((rows, shape[1]), -math.inf, device=device)
    if sinks is not None:
        lse[:] = sinks
    if state is not None:
        out[: len(state.lse)] = state.out
        lse[: len(state.lse)] = state.lse
    return State(out, lse)
