"""How much a plan for the CUDA kernels may hold, and what size holds any plan of a tree."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.bsr import Queries
from prefixkit.attention.gpu_cost import H200, NARROW_ROWS, GpuCost
from prefixkit.attention.kv_split import EXTRA
from prefixkit.attention.plan import Plan
from prefixkit.attention.sharing import HeadShape, may_share
from prefixkit.tree.snapshot import Ints, TreeSnapshot

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
        wide, narrow: Items.
        segments: Segments of all items.
        rows: Query rows.
        partials: Partial rows; the op keeps ``partials * heads * (head_dim + 1)`` floats for them.
    """

    wide: int
    narrow: int
    segments: int
    rows: int
    partials: int

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the six arrays, in the order of :meth:`Plan.arrays`; none is empty, so that all have an address."""
        wide, narrow, segments, partials = (max(n, 1) for n in (self.wide, self.narrow, self.segments, self.partials))
        return (8,), (wide, 8), (narrow, 8), (segments, 3), (self.rows + 1,), (partials,)

    def holds(self, need: PlanCapacity) -> bool:
        """Whether a plan that needs so much fits."""
        return all(getattr(self, field.name) >= getattr(need, field.name) for field in fields(self))

    def check(self, need: PlanCapacity, what: str = "the plan") -> None:
        """Raise PlanTooLarge, naming all that ``need`` has more of."""
        short = [
            f"{getattr(need, field.name)} {field.name} (room for {getattr(self, field.name)})"
            for field in fields(self)
            if getattr(need, field.name) > getattr(self, field.name)
        ]
        if short:
            raise PlanTooLarge(f"{what} needs {', '.join(short)}; make larger buffers, and capture graphs anew")


def scratch_ints(nodes: int, wide: int, narrow: int, rows: int) -> int:
    """Int32 elements that the op ``plan_tree`` needs beside a plan, for trees of so many nodes and plans of this capacity."""
    items = wide + narrow + 8
    return NODE_INTS * (nodes + 8) + (_TILE_INTS + _ITEM_INTS) * items + rows + _SPARE_INTS


def size_of(plan: Plan) -> PlanCapacity:
    """What this plan needs."""
    return PlanCapacity(len(plan.wide), len(plan.narrow), len(plan.segments), plan.num_rows, plan.num_partial_rows)


def capacity_for(
    snapshot: TreeSnapshot,
    queries: Queries,
    shape: HeadShape,
    num_sms: int,
    cost: GpuCost = H200,
) -> PlanCapacity:
    """Room for any plan of this tree and these rows, whatever its nodes' lengths and whatever is shared.

    Args:
        snapshot, queries: The tree, and which of its nodes have query rows.
        shape: The heads.
        num_sms: Multiprocessors of the GPU.
        cost: For its numbers of workers, and the query heads of its tiles.
    """
    own, below = _rows(snapshot, queries)
    return _room(snapshot, own, below, below > 0, shape, num_sms, cost)


def room_for(
    snapshot: TreeSnapshot, queries: Queries, shape: HeadShape, num_sms: int, cost: GpuCost = H200
) -> PlanCapacity:
    """Room for the plan of this tree with its nodes as long as they are now: less than for any, where few can be shared."""
    own, below = _rows(snapshot, queries)
    shared = may_share(snapshot, own, below, shape, cost.sharing)
    return _room(snapshot, own, below, shared, shape, num_sms, cost)


def _rows(snapshot: TreeSnapshot, queries: Queries) -> tuple[Ints, Ints]:
    """``[nodes]`` query rows in each node, and in its proper descendants."""
    own = queries.rows_per_node(snapshot.num_nodes)
    row_of_node = np.concatenate(([0], np.cumsum(own)))
    return own, row_of_node[snapshot.subtree_end] - row_of_node[1:]


def _room(
    snapshot: TreeSnapshot,
    own: Ints,
    below: Ints,
    shared: NDArray[np.bool_],
    shape: HeadShape,
    num_sms: int,
    cost: GpuCost,
) -> PlanCapacity:
    """Room for any plan that shares no nodes but ``shared``."""
    group, tile_rows = shape.group, cost.sharing.tile_heads
    asking, above = np.flatnonzero(own), np.flatnonzero(shared)
    queries_of = np.concatenate((own[asking], below[above]))
    # Segments of a row that folds all above it.
    reads = snapshot.depth()[np.concatenate((asking, above))].astype(np.int64) + 1
    thin, most = queries_of * group <= NARROW_ROWS, max(1, tile_rows // group)
    tiles = np.where(thin, 1, -(-queries_of // most))
    # A row's last tile may be a narrow one.
    ends_thin = ~thin & ((queries_of - (tiles - 1) * most) * group <= NARROW_ROWS)
    narrow = int(thin.sum() + ends_thin.sum())
    extra_wide, extra_narrow = (EXTRA * role.workers * num_sms // shape.kv_heads for role in (cost.wide, cost.narrow))
    extra_narrow = extra_narrow if narrow else 0
    cuts = extra_wide * max(1, tile_rows // group) + extra_narrow * max(1, NARROW_ROWS // group)
    return PlanCapacity(
        wide=int(tiles[~thin].sum()) + extra_wide,
        narrow=narrow + extra_narrow,
        segments=int((reads * (1 + tiles)).sum()) + extra_wide + extra_narrow,
        rows=int(own.sum()),
        partials=int(queries_of.sum()) + cuts,
    )
