"""How much a plan for the CUDA kernels may hold, and an upper bound for any plan of a tree."""

from __future__ import annotations

from operator import ge
from typing import NamedTuple

import numpy as np

from prefixkit.attention.gpu.gpu_cost import H200, GpuCost
from prefixkit.attention.gpu.kv_split import EXTRA
from prefixkit.attention.paths.heavy_paths import continues_path, meets_parent
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import HeadShape, may_begin_part, may_share

# Buffers for plans made on a GPU have capacity for any plan of a tree; partial states may take at most this much.
MOST_PARTIAL_BYTES = 2**29
# Ints that a planner on a GPU needs for each node, tile and item (csrc/planner/plan_state.cuh), and spare ones for
# rounding up.
NODE_INTS, _TILE_INTS, _ITEM_INTS, _SPARE_INTS = 10, 6, 7, 256
_PATH_INTS, _PATH_TILE_INTS = 12, 2  # more ints for plans by heavy paths; besides one for each segment
# Fewest entries of the lists of a plan or a tree that kernels take: an empty tensor has no address, and for lists of
# zero or one entry torch.compile would make separate graphs.
FEWEST_ENTRIES = 2
OVERFLOW = 7  # index in counts: 1 if a plan made on the GPU did not fit, and is empty


class PlanTooLarge(ValueError):
    """A plan does not fit the buffers made for it."""


class PlanCapacity(NamedTuple):
    """How much a plan may hold.

    Attributes:
        tile_items, decode_items: Items of each kind.
        segments: Segments of all items.
        rows: Query rows.
        partials: Partial rows; the op allocates ``partials * heads * (head_dim + 1)`` floats for them.
        paths: 1 if plans may be by heavy paths, for which the GPU needs more facts of the tree and another planner.
    """

    tile_items: int
    decode_items: int
    segments: int
    rows: int
    partials: int
    paths: int = 0

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the seven arrays, in the order of ``Plan.arrays``; none has fewer entries than FEWEST_ENTRIES."""
        tile, decode, segments, _, partials = (max(n, FEWEST_ENTRIES) for n in self[:5])
        return (8,), (tile, 8), (decode, 8), (segments, 3), (self.rows + 1,), (partials,), (partials,)

    def holds(self, need: PlanCapacity) -> bool:
        """Whether a plan of the size ``need`` fits."""
        return all(map(ge, self, need))

    def check(self, need: PlanCapacity, what: str = "the plan") -> None:
        """Raise PlanTooLarge if a plan of the size ``need`` does not fit, naming everything that is too small."""
        each = zip(self._fields, self, need, strict=True)
        short = [f"{more} {name} (capacity {have})" for name, have, more in each if more > have]
        if short:
            raise PlanTooLarge(f"{what} needs {', '.join(short)}; make larger buffers, and capture graphs anew")


def scratch_ints(nodes: int, tile: int, decode: int, rows: int, segments: int = 0) -> int:
    """Int32 elements of workspace that the op ``plan_tree`` needs, for ``nodes`` nodes and plans of this capacity, with
    ``segments`` segments if plans may be by heavy paths.
    """
    items = tile + decode + 8
    by_paths = _PATH_INTS * (nodes + 8) + _PATH_TILE_INTS * items + segments if segments else 0
    return NODE_INTS * (nodes + 8) + (_TILE_INTS + _ITEM_INTS) * items + rows + _SPARE_INTS + by_paths


def capacity_for(
    tree: StepTree, shape: HeadShape, num_sms: int, cost: GpuCost = H200, *, now: bool = False, paths: bool = False
) -> PlanCapacity:
    """Capacity for any plan of this tree and these rows, for all lengths of nodes and all choices of what is shared.

    Args:
        tree: The tree, and which of its nodes have query rows.
        shape, num_sms: The heads, and the multiprocessors of the GPU.
        cost: The cost model, for its numbers of workers and of query heads per tile.
        now: Only for the nodes' current lengths: less, if few nodes can be shared.  It is assumed if reading costs
            nothing, as no length then makes sharing pay.
        paths: One part of each heavy path is shared, as :func:`decide_sharing` does with paths.
    """
    now = now or not cost.sharing.kv_byte
    if paths:
        continues = continues_path(tree.snapshot)
        # Behind missing tokens another part begins.
        shared = may_begin_part(tree, shape, cost.sharing) if now else ~continues
        shared = (shared | (continues & ~meets_parent(tree.snapshot))) & (tree.below > 0)
    else:
        shared = may_share(tree, shape, cost.sharing) if now else tree.below > 0
    # Queries per item: of a tile, a low tile, a decode item.
    most = max(1, cost.sharing.tile_heads // shape.gqa_group)
    low = max(1, (cost.low_tile_heads or cost.sharing.tile_heads) // shape.gqa_group)
    least = cost.sharing.decode_heads // shape.gqa_group
    with_queries, above = np.flatnonzero(tree.own_rows), np.flatnonzero(shared)
    queries_of = np.concatenate((tree.own_rows[with_queries], tree.below[above]))
    # Segments of a BSR row that all ancestors join; a path continues to a leaf, the last node of its subtree.
    ends = tree.snapshot.subtree_end[above] - 1 if paths else above
    reads = tree.depth[np.concatenate((with_queries, ends))].astype(np.int64) + 1
    tiles = -(-queries_of // low)
    # A BSR row of few queries is a decode item, and the last tile of others may be one; a part may begin further down.
    may_decode = (queries_of - (tiles - 1) * low <= least) | ((queries_of - 1) % most < least)
    decode = int(np.count_nonzero(may_decode | (least > 0 and paths)))
    tile_items = int(tiles.sum() - np.count_nonzero(queries_of <= least))
    extra_tiles, extra_decodes = (EXTRA * role.workers * num_sms // shape.kv_heads for role in (cost.tile, cost.decode))
    extra_decodes = extra_decodes if decode else 0
    return PlanCapacity(
        tile_items=tile_items + extra_tiles,
        decode_items=decode + extra_decodes,
        segments=int(reads @ (1 + tiles)) + extra_tiles + extra_decodes,
        rows=tree.queries.num_rows,
        partials=int(queries_of.sum()) + extra_tiles * most + extra_decodes * max(1, least),
        paths=int(paths),
    )
