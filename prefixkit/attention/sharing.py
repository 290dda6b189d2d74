"""Which nodes are worth sharing: a linear cost model of one layer's attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.ancestry import Longs, mark
from prefixkit.attention.queries import StepTree
from prefixkit.tree.snapshot import Ints

# Query heads (queries x group) of a decode row at most, and of the largest tile by default.
DECODE_HEADS, TILE_HEADS = 8, 128


@dataclass(frozen=True)
class CostModel:
    """What the parts of one layer's attention cost, in microseconds.

    Attributes:
        item: A work item of its own: launching it, or one more library call.
        kv_byte: Reading one byte of K or V.
        partial_byte: Writing one byte of a partial state and reading it back to merge it.
        tile_item, decode_item: Beside ``item``, for each KV head and each tile that reads a shared node: of ``tile_heads``
            query heads, or of :data:`DECODE_HEADS` where these hold them all.
        tile_heads: Query heads of the kernels' largest tile.
    """

    item: float
    kv_byte: float
    partial_byte: float
    tile_item: float = 0.0
    decode_item: float = 0.0
    tile_heads: int = TILE_HEADS

    def __post_init__(self) -> None:
        for name in ("item", "kv_byte", "partial_byte", "tile_item", "decode_item"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"CostModel: {name} must be a time of at least 0 us, got {value!r}")
        if self.tile_heads <= DECODE_HEADS:
            raise ValueError(f"CostModel: tile_heads must be above {DECODE_HEADS}, got {self.tile_heads!r}")


# One thread of a 2.6 GHz x86 server core, float32: gathering and reading a private token of 1.5 KB takes 0.1 us, an extra
# item 30 us, an extra partial row of 2.3 KB 0.7 us.
CPU_COST = CostModel(item=30.0, kv_byte=6.5e-5, partial_byte=3e-4)


@dataclass(frozen=True)
class HeadShape:
    """The attention heads of one layer, as far as cost and tiles depend on them."""

    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's K and V."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def partial_bytes(self) -> int:
        """Bytes of one query's partial state: float32 output and log-sum-exp of all heads."""
        return 4 * self.heads * (self.head_dim + 1)


def decide_sharing(tree: StepTree, shape: HeadShape, cost: CostModel) -> NDArray[np.bool_]:
    """Decide for each node whether its KV is read once for all queries below it, or once for each row that needs it.

    A shared node costs one more item, its tiles, and one more partial state for each query below; a folded one is read again
    by each of its consumers, the rows among its descendants which its tokens then join.  The choice is made bottom-up: what a
    node's children decided tells how many consumers it has.  A node with one consumer always folds.  By this model no choice is
    slower than sharing nothing: each takes what it gains, and leaves those above it fewer consumers, never more.

    Args:
        tree: The tree and the step's query rows.
        shape: The heads.
        cost: The cost model.

    Returns:
        ``[nodes]`` True where the node is shared; False also where no query sits below.
    """
    candidate, most, price = _candidates(tree, shape, cost)
    snapshot = tree.snapshot
    shared = np.zeros(snapshot.num_nodes, dtype=bool)
    nodes = np.flatnonzero(candidate)
    if not len(nodes):
        return shared
    marked = mark(snapshot.subtree_end, candidate)
    nearest = marked.nearest(nodes)
    above = np.where(nearest >= 0, np.searchsorted(nodes, nearest), len(nodes))
    rows = _Candidates(most[nodes], snapshot.length[nodes], price[nodes], above, cost.kv_byte * shape.kv_bytes)
    levels = int(marked.above.max()) + 1
    shared[nodes] = rows.by_level(marked.above[nodes], levels) if levels < len(nodes) / 24 else rows.one_by_one()
    return shared


def may_share(tree: StepTree, shape: HeadShape, cost: CostModel) -> NDArray[np.bool_]:
    """``[nodes]`` False where :func:`decide_sharing` cannot share a node, whatever it decides for those below."""
    return _candidates(tree, shape, cost)[0]


def _candidates(
    tree: StepTree, shape: HeadShape, cost: CostModel
) -> tuple[NDArray[np.bool_], Longs, NDArray[np.float64]]:
    """Which nodes would gain if nothing below were shared; their consumers then, and the price of sharing them."""
    snapshot, rows_below = tree.snapshot, tree.below
    price_per_row = cost.partial_byte * shape.partial_bytes
    price: NDArray[np.float64] = cost.item + _tiles(rows_below, shape, cost) + rows_below * price_per_row
    owners = np.concatenate(([0], np.cumsum(tree.own > 0)))
    # Where so many consumers gain nothing, fewer will not either.
    most = owners[snapshot.subtree_end] - owners[1:]
    gain = (most - 1) * snapshot.length * (cost.kv_byte * shape.kv_bytes)
    return (rows_below > 0) & (gain > price), most, price


def _tiles(rows_below: Ints, shape: HeadShape, cost: CostModel) -> NDArray[np.float64]:
    """``[nodes]`` what the tiles of a dense row cost."""
    tile = -(-rows_below // max(1, cost.tile_heads // shape.group)) * np.float64(cost.tile_item * shape.kv_heads)
    return np.where(rows_below * shape.group <= DECODE_HEADS, cost.decode_item * shape.kv_heads, tile)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Nodes that may be shared, in depth-first order.

    ``most`` consumers if nothing below is shared; ``above`` is the nearest candidate above, or their number if there is none.
    """

    most: Longs
    length: Ints
    price: NDArray[np.float64]
    above: Longs
    gain_per_token: float

    def by_level(self, rank: Longs, levels: int) -> NDArray[np.bool_]:
        """The decision, from the deepest level up: for trees with many nodes in each level."""
        shared = np.zeros(len(self.most), dtype=bool)
        spared = np.zeros(len(self.most) + 1, dtype=np.int64)  # of `most`, by what is shared below
        order = np.argsort(rank, kind="stable")
        bounds = np.searchsorted(rank[order], np.arange(levels + 1))
        for level in range(levels - 1, -1, -1):
            here = order[bounds[level] : bounds[level + 1]]
            gain = (self.most[here] - spared[here] - 1) * self.length[here] * self.gain_per_token
            shared[here] = gain > self.price[here]
            np.add.at(spared, self.above[here], np.where(shared[here], self.most[here] - 1, spared[here]))
        return shared

    def one_by_one(self) -> NDArray[np.bool_]:
        """The same, node by node: for few nodes, and for deep trees."""
        most, length, price, above = (a.tolist() for a in (self.most, self.length, self.price, self.above))
        shared, spared = [False] * len(most), [0] * (len(most) + 1)
        for here in range(len(most) - 1, -1, -1):
            shared[here] = (most[here] - spared[here] - 1) * length[here] * self.gain_per_token > price[here]
            spared[above[here]] += most[here] - 1 if shared[here] else spared[here]
        return np.array(shared)
