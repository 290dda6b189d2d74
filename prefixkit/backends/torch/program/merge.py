"""Merging partial states, row by row, in a fixed order, with a handful of torch calls for all rows.

States over disjoint sets of keys merge into the state over their union (FlashInfer, section 2.2).  A state over no keys
is ``out = 0``, ``lse = -inf``; merging it changes nothing.

Rows are sorted by their number of partial states, most first.  Level ``k`` holds the ``k``-th partial state of every
row that has more than ``k``; these are the first rows.  So a level is one vectorised operation, and every row merges in
a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixkit.ops.partial_states import State, merge_parts
from prefixkit.tree.arrays import Longs

# Rows of a tensor: the first row, if they are consecutive; else ``[rows]`` int64.
Index = int | Tensor


def index_of(rows: Longs) -> Index:
    """The ``Index`` of some rows of a tensor."""
    return int(rows[0]) if bool((rows[1:] - rows[:-1] == 1).all()) else torch.from_numpy(rows)


def pick(tensor: Tensor, index: Index, count: int) -> Tensor:
    """``[count, ...]`` rows of a tensor; a view where they are consecutive."""
    if isinstance(index, Tensor):
        return tensor.index_select(0, index)
    return tensor if count == tensor.shape[0] else tensor.narrow(0, index, count)


@dataclass(frozen=True, eq=False)
class Level:
    """One partial state for each of the first ``rows`` rows."""

    rows: int
    call: int  # the call whose state holds all of them; -1: they are in the states of ``Merge.joined``, concatenated
    index: Index  # their rows in that state


@dataclass(frozen=True, eq=False)
class Merge:
    """How rows of the calls' states merge into rows of a result.

    Attributes:
        levels: See the top of this file.
        joined: Calls whose states are concatenated, because some level reads several of them.
        sorted_index: ``[rows of the result]`` int64, the position of each row's state after sorting; None if rows are
            in order and none is empty.
    """

    levels: tuple[Level, ...]
    joined: tuple[int, ...]
    sorted_index: Tensor | None


def plan_merge(num_rows: int, row: Longs, call: Longs, index: Longs, heights: Longs) -> Merge:
    """Plan the merge of partial states into rows of the result.

    Partial state ``i`` is row ``index[i]`` of the state of call ``call[i]``, and is merged into row ``row[i]``, in
    order of ``i``.  ``heights``: ``[calls]``, the rows of each call's state.
    """
    by_row = row.argsort(kind="stable")
    count = np.bincount(row, minlength=num_rows)
    begin = count.cumsum() - count
    sorted_rows = (-count).argsort(kind="stable")
    in_order = bool((count == count[0]).all()) and bool(count[0]) if num_rows else True
    partials = [
        by_row[begin[rows] + level]
        for level in range(int(count.max(initial=0)))
        for rows in (sorted_rows[count[sorted_rows] > level],)
    ]
    spread = [call[part] for part in partials if (call[part] != call[part[0]]).any()]
    joined = np.unique(np.concatenate(spread)) if spread else np.zeros(0, dtype=np.int64)
    offset = np.zeros_like(heights)
    offset[joined] = heights[joined].cumsum() - heights[joined]
    sorted_index = np.empty(num_rows, dtype=np.int64)
    sorted_index[sorted_rows] = np.arange(num_rows)
    return Merge(
        levels=tuple(_level(call[part], index[part], offset) for part in partials),
        joined=tuple(joined.tolist()),
        sorted_index=None if in_order else torch.from_numpy(sorted_index),
    )


def _level(call: Longs, index: Longs, offset: Longs) -> Level:
    if bool((call == call[0]).all()):
        return Level(len(index), int(call[0]), index_of(index))
    return Level(len(index), -1, index_of(offset[call] + index))


def run_merge(
    merge: Merge,
    states: Sequence[State],
    shape: tuple[int, int, int],
    device: torch.device,
    may_be_empty: bool,
    sinks: Tensor | None,
) -> State:
    """Merge as planned.

    Args:
        merge: The plan.
        states: The calls' states.
        shape: ``(rows, heads, v_dim)`` of the result.
        device: The device of the result.
        may_be_empty: Whether a partial state can have ``lse = -inf``.
        sinks: ``[heads]`` float32 logits that join every row's denominator, in the states' order of heads; or None.
    """
    if not merge.levels:
        return _with_empty_rows(None, shape, device, sinks)
    if merge.joined:
        joined = State(*map(torch.cat, zip(*(states[call] for call in merge.joined), strict=True)))
        states = [*states, joined]  # at index -1
    parts = [State(*(pick(tensor, level.index, level.rows) for tensor in states[level.call])) for level in merge.levels]
    merged = parts[0] if len(parts) == 1 and sinks is None else merge_parts(parts, may_be_empty, sinks)
    if merge.sorted_index is None:
        return merged
    if merged.lse.shape[0] < shape[0]:
        merged = _with_empty_rows(merged, shape, device, sinks)
    return State(*(tensor.index_select(0, merge.sorted_index) for tensor in merged))


def _with_empty_rows(
    state: State | None, shape: tuple[int, int, int], device: torch.device, sinks: Tensor | None
) -> State:
    """The state with empty rows appended, up to the number of rows of the result."""
    out = torch.zeros(shape, dtype=torch.float32, device=device)
    lse = torch.full(shape[:2], -math.inf, dtype=torch.float32, device=device)
    if sinks is not None:
        lse[:] = sinks
    if state is not None:
        out[: len(state.lse)], lse[: len(state.lse)] = state
    return State(out, lse)
