"""Programs: a layer's kernel calls, and how their results merge; compiled from a plan once, run in every layer."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.plan import Plan
from prefixkit.attention.queries import UNNUMBERED, StepTree, UnnumberedSequences
from prefixkit.attention.variants import Variant
from prefixkit.backends.torch.program.attention_calls import Call, batches, elements_of, make_call
from prefixkit.backends.torch.program.merge import Merge, plan_merge
from prefixkit.backends.torch.program.row_blocks import LIMITED_ROWS
from prefixkit.backends.torch.program.tiles import LIMITED, Tiles, make_tiles, split_keys
from prefixkit.backends.torch.tuning import Heads
from prefixkit.tree.arrays import Longs


@dataclass(frozen=True, eq=False)
class Program:
    """Kernel calls, and how their results merge into the rows of the output.

    Attributes:
        heads: The heads that it computes.
        calls: In order; each makes a state.
        merge: Merges the rows of these states into the rows of the output.
        grouped: Every state has its heads in the order ``(gqa_group, kv_heads)``; else all are in query-head order.
        may_be_empty: Whether some partial state may have seen no key.
        on_cpu: Made for a CPU: pages are token-major, and keys are converted to float32.  Else pages have any layout,
            and keys are gathered in their own dtype.
    """

    heads: Heads
    calls: tuple[Call, ...]
    merge: Merge
    grouped: bool
    may_be_empty: bool
    on_cpu: bool

    def to(self, device: torch.device) -> Program:
        """Copy the program, with its tensors on a device."""
        return replace(self, calls=_moved(self.calls, device), merge=_moved(self.merge, device))


def _moved(part: Any, device: torch.device) -> Any:
    """A part of a program with all tensors in it on a device."""
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, tuple):
        moved = (_moved(each, device) for each in part)
        return type(part)(*moved) if hasattr(part, "_fields") else tuple(moved)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: _moved(getattr(part, field.name), device) for field in fields(part)})
    return part


def compile_program(
    plan: Plan,
    tree: StepTree,
    num_pages: int,
    heads: Heads,
    variant: Variant,
    dtype: torch.dtype,
    *,
    on_cpu: bool,
    device: torch.device,
    expanded: bool = False,
    scored: bool = False,
) -> Program:
    """The program of a step's plan for one pool, one set of heads and one variant.

    Args:
        plan, tree: The plan, and its tree.
        num_pages: Pages of the pool.
        heads: The heads of the layer.
        variant: The attention variant.
        dtype: The dtype of the pages.
        on_cpu: The program is for a CPU: it uses torch's flash attention if the variant does not change scores, which
            reads float32 keys in place.  Else it is for plain torch on a GPU, and runs on tensors of any device.
        device: The device of the tensors that a variant's functions capture.
        expanded: K and V are computed from the pages' contents, for each call.
        scored: Scores are computed in plain torch for any variant, because each row has a mask of its own.

    Raises:
        IndexError: a node names a slot that the pool does not have.
    """
    # torch's kernel takes K and V of one head size.  Padding them costs more than scores in memory: one row of 16 heads
    # of sizes 192 and 128 on 1,000 keys takes 2,335 us padded, and 969 with scores.  But scores need blocks of few
    # rows, and expanded K and V would be expanded again for each block.
    if variant.reads("b") and tree.queries.sequence is None:
        raise UnnumberedSequences("tree_attention: " + UNNUMBERED)
    one_size = expanded or heads.value_dim == heads.head_dim
    flash = on_cpu and not scored and variant.biases is not None and one_size
    scored = not flash or bool(variant.mods)
    most_rows = None
    if scored:
        masked = heads.tuning.distance_rows if variant.by_distance else heads.tuning.masked_rows
        most_rows = masked if flash else heads.tuning.scored_rows
    most = heads.tuning.call_elements if flash else heads.tuning.score_elements
    reach = tree.reach if variant.looks_ahead else None
    limited_rows = None if expanded else LIMITED_ROWS  # the keys would be expanded again for each tile
    whole_from = heads.tuning.group_rows if flash and variant.by_distance else None
    tiles = make_tiles(plan, tree, variant.visible, most_rows, reach, limited_rows, whole_from)
    _check_slots(tiles, num_pages * tree.snapshot.page_size)
    tiles = split_keys(
        tiles,
        shortest=heads.longest_copy if on_cpu and not expanded else np.iinfo(np.int64).max,
        longest=_longest(tiles, heads, on_cpu and not expanded and dtype == torch.float32, most if scored else None),
    )
    calls: list[Call] = []
    room = heads.tuning.call_elements  # for biases that are made once
    call_of, first = np.full((2, len(tiles)), -1, dtype=np.int64)
    descending = np.zeros(len(tiles), dtype=bool)
    for batch in batches(tiles, heads, most if scored else None):
        call = make_call(tiles, batch, tree, plan.limits, heads, variant, device, flash=flash, views=on_cpu, room=room)
        if call is not None:
            room -= 0 if call.mask is None else elements_of(call.mask)
            call_of[batch], first[batch] = len(calls), np.arange(len(batch)) * call.rows
            descending[batch] = call.descending
            calls.append(call)
    row, tile, within = _partials(plan, tree.queries.num_rows, tiles, call_of)
    within = np.where(descending[tile], tiles.rows[tile] - 1 - within, within)
    heights = np.array([call.batch * call.rows for call in calls], dtype=np.int64)
    return Program(
        heads=heads,
        calls=tuple(calls),
        merge=plan_merge(tree.queries.num_rows, row, call_of[tile], first[tile] + within, heights),
        grouped=all(call.grouped for call in calls),
        may_be_empty=not flash or any(call.empty is not None or call.biased for call in calls),
        on_cpu=on_cpu,
    )


def _check_slots(tiles: Tiles, num_slots: int) -> None:
    low, high = tiles.slot.min(initial=0), (tiles.slot + tiles.count).max(initial=0)
    if low < 0 or high > num_slots:
        raise IndexError(
            f"tree_attention: nodes name slots {low}..{high - 1}, but the pages hold slots 0..{num_slots - 1}"
        )


def _longest(tiles: Tiles, heads: Heads, exact_views: bool, scored: int | None) -> Longs:
    """Tokens beyond which a tile's keys are split, to bound memory.

    It bounds copies and masks by limits, and to ``scored`` elements scores and other masks.
    """
    most = heads.tuning.call_elements
    longest: Longs = np.full(len(tiles), max(1, most // heads.kv_elements))
    if exact_views:
        longest[tiles.runs == 1] = np.iinfo(np.int64).max
    if (limited := tiles.mask == LIMITED).any():
        longest = np.where(limited, np.minimum(longest, np.maximum(1, most // tiles.rows)), longest)
    if scored is not None:
        np.minimum(longest, np.maximum(1, scored // (heads.heads * tiles.rows)), out=longest)
    return longest


def _partials(plan: Plan, num_rows: int, tiles: Tiles, call_of: Longs) -> tuple[Longs, Longs, Longs]:
    """The query row, the tile and the row in it of each partial state, in the plan's merge order, then by tile."""
    called = (call_of >= 0).nonzero()[0]
    rows = tiles.rows[called]
    tile = called.repeat(rows)
    within = np.arange(len(tile)) - (rows.cumsum() - rows).repeat(rows)
    row = tiles.row[tile] + within
    items = plan.items[tiles.item[tile]]
    partial = np.where(items[:, 2] < 0, -1, items[:, 2] + row - items[:, 0])
    turn = np.full(int(max(partial.max(initial=-1), plan.merge_indices.max(initial=-1))) + 2, -1)
    turn[plan.merge_indices] = np.arange(len(plan.merge_indices))
    merged = partial >= 0
    listed = turn[partial[merged]]
    owner = np.arange(num_rows).repeat(plan.merge_indptr[1:] - plan.merge_indptr[:-1])
    assert (owner[listed] == row[merged]).all(), "a partial merges into another query's row"
    assert (listed >= 0).all(), "a partial merges nowhere"
    order = np.lexsort((tile, turn[partial], row))
    return row[order], tile[order], within[order]
