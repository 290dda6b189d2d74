"""How much a plan for the CUDA kernels may hold, and what size holds any plan of a tree."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from prefixkit.attention.gpu_cost import H200, GpuCost
from prefixkit.attention.kv_split import EXTRA
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import DECODE_ROWS, HeadShape, may_share

# A plan made by a GPU has capacity for any plan, and the attention op for its partial states: no more than this.
MOST_PARTIAL_BYTES = 2**29
# Ints that a planner on a GPU keeps for each node, tile and item (csrc/planner/plan_state.cuh); spare ones to round up.
NODE_INTS, _TILE_INTS, _ITEM_INTS, _SPARE_INTS = 10, 6, 7, 256
OVERFLOW = 7  # of counts: 1 where a plan made on the GPU did not fit, and is empty


class PlanTooLarge(ValueError):
    """A plan does not fit the buffers made for it."""


@dataclass(frozen=True)
class PlanCapacity:
    """How much a plan may hold.

    Attributes:
        tile_items, decode_items: Items.
        segments: Segments of all items.
        rows: Query rows.
        partials: Partial rows; the op keeps ``partials * heads * (head_dim + 1)`` floats for them.
    """

    tile_items: int
    decode_items: int
    segments: int
    rows: int
    partials: int

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the six arrays, in the order of ``Plan.arrays``; none is empty, so that all have an address."""
        tile, decode, segments, partials = (
            max(n, 1) for n in (self.tile_items, self.decode_items, self.segments, self.partials)
        )
        return (8,), (tile, 8), (decode, 8), (segments, 3), (self.rows + 1,), (partials,)

    def holds(self, need: PlanCapacity) -> bool:
        """Whether a plan that needs so much fits."""
        return all(getattr(self, field.name) >= getattr(need, field.name) for field in fields(self))

    def check(self, need: PlanCapacity, what: str = "the plan") -> None:
        """Raise PlanTooLarge, naming all that ``need`` has more of."""
        short = [
            f"{getattr(need, field.name)} {field.name} (capacity {getattr(self, field.name)})"
            for field in fields(self)
            if getattr(need, field.name) > getattr(self, field.name)
        ]
        if short:
            raise PlanTooLarge(f"{what} needs {', '.join(short)}; make larger buffers, and capture graphs anew")


def scratch_ints(nodes: int, tile: int, decode: int, rows: int) -> int:
    """Int32 elements that the op ``plan_tree`` needs beside a plan, for so many nodes and plans of this capacity."""
    items = tile + decode + 8
    return NODE_INTS * (nodes + 8) + (_TILE_INTS + _ITEM_INTS) * items + rows + _SPARE_INTS


def capacity_for(
    tree: StepTree, shape: HeadShape, num_sms: int, cost: GpuCost = H200, *, now: bool = False
) -> PlanCapacity:
    """Capacity for any plan of this tree and these rows, whatever its nodes' lengths and whatever is shared.

    Args:
        tree: The tree, and which of its nodes have query rows.
        shape: The heads.
        num_sms: Multiprocessors of the GPU.
        cost: For its numbers of workers, and the query heads of its tiles.
        now: Only with its nodes as long as they are now: less, where few can be shared.
    """
    shared = may_share(tree, shape, cost.sharing) if now else tree.below > 0
    group, tile_rows = shape.group, cost.sharing.tile_heads
    own, above = np.flatnonzero(tree.own), np.flatnonzero(shared)
    queries_of = np.concatenate((tree.own[own], tree.below[above]))
    # Segments of a row that all ancestors join.
    reads = tree.snapshot.depth()[np.concatenate((own, above))].astype(np.int64) + 1
    thin, most = queries_of * group <= DECODE_ROWS, max(1, tile_rows // group)
    tiles = np.where(thin, 1, -(-queries_of // most))
    # A row's last tile may be a decode item.
    ends_thin = ~thin & ((queries_of - (tiles - 1) * most) * group <= DECODE_ROWS)
    decode = int(thin.sum() + ends_thin.sum())
    extra_tiles, extra_decodes = (EXTRA * role.workers * num_sms // shape.kv_heads for role in (cost.tile, cost.decode))
    extra_decodes = extra_decodes if decode else 0
    splits = extra_tiles * max(1, tile_rows // group) + extra_decodes * max(1, DECODE_ROWS // group)
    return PlanCapacity(
        tile_items=int(tiles[~thin].sum()) + extra_tiles,
        decode_items=decode + extra_decodes,
        segments=int((reads * (1 + tiles)).sum()) + extra_tiles + extra_decodes,
        rows=int(tree.own.sum()),
        partials=int(queries_of.sum()) + splits,
    )
