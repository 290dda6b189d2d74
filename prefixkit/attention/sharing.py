"""Which nodes are worth sharing: a linear cost model of one layer's attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.ancestry import mark
from prefixkit.attention.paths.path_sharing import may_begin, share_paths
from prefixkit.attention.queries import StepTree
from prefixkit.attention.visible import ALL, Visible
from prefixkit.tree.arrays import Ints, Longs

# Query heads (queries x GQA group) of a decode item at most, and of the largest tile, by default.
DECODE_ROWS, TILE_ROWS = 8, 128


@dataclass(frozen=True)
class CostModel:
    """What the parts of one layer's attention cost, in microseconds.

    Attributes:
        item: A work item of its own: launching it, or one more library call.
        kv_byte: Reading one byte of K or V.
        partial_byte: Writing one byte of a partial state and reading it back to merge it.
        tile_item, decode_item: Beside ``item``, for each KV head and each shared-prefix tile: of ``tile_heads`` query
            heads, or of ``decode_heads`` where these hold them all.
        tile_path: What a launch with tile items takes longer than one without.  Sharing that spares less in all is left
            out where it alone would make tile items.
        tile_heads: Query heads of the kernels' largest tile.
        decode_heads: Query heads of a decode item at most; fewer than ``tile_heads``.
        read_by_tiles: 1 where each tile of a node reads its tokens, as on a GPU: then what reads a node anew if it is
            not shared are the tiles of its consumers.  0 where one item reads them for all queries.
    """

    item: float
    kv_byte: float
    partial_byte: float
    tile_item: float = 0.0
    decode_item: float = 0.0
    tile_path: float = 0.0
    tile_heads: int = TILE_ROWS
    decode_heads: int = DECODE_ROWS
    read_by_tiles: int = 0

    def __post_init__(self) -> None:
        for name in ("item", "kv_byte", "partial_byte", "tile_item", "decode_item", "tile_path"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"CostModel: {name} must be a time of at least 0 us, got {value!r}")
        if not 0 < self.decode_heads < self.tile_heads:
            raise ValueError(
                f"CostModel: tile_heads must be above decode_heads, and these above 0, got {self.tile_heads!r} and "
                f"{self.decode_heads!r}"
            )


# One thread of a 2.6 GHz x86 server core, float32: gathering and reading a private token of 1.5 KB takes 0.1 us, an
# extra item 30 us, an extra partial row of 2.3 KB 0.7 us.
CPU_COST = CostModel(item=30.0, kv_byte=6.5e-5, partial_byte=3e-4)


@dataclass(frozen=True)
class HeadShape:
    """The attention heads of one layer, as far as cost and tiles depend on them.

    Attributes:
        heads, kv_heads: Query heads and KV heads.
        head_dim: Elements of a head of Q and K.
        itemsize: Bytes of an element of K and V.
        v_dim: Elements of a head of V and of the output; None: ``head_dim``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    v_dim: int | None = None

    @property
    def plan_heads(self) -> tuple[int, int, int, int, int]:
        """Query heads, KV heads, ``head_dim``, ``itemsize`` and ``value_dim``, as ``plan_tree`` takes them."""
        return self.heads, self.kv_heads, self.head_dim, self.itemsize, self.value_dim

    @property
    def gqa_group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        """Elements of a head of V and of the output."""
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's K and V."""
        return self.kv_heads * (self.head_dim + self.value_dim) * self.itemsize

    @property
    def partial_bytes(self) -> int:
        """Bytes of one query's partial state: float32 output and log-sum-exp of all heads."""
        return 4 * self.heads * (self.value_dim + 1)


def decide_sharing(
    tree: StepTree, shape: HeadShape, cost: CostModel, visible: Visible = ALL, *, paths: bool = False
) -> NDArray[np.bool_]:
    """Decide for each node whether its KV is read once for all queries below it, or once for each row that needs it.

    A shared node costs one more item, its tiles, and one more partial state for each query below; any other is read
    again by each of its consumers, the rows among its descendants which its tokens then join.  The choice is made
    bottom-up: what a node's children decided tells how many consumers it has.  A node with one consumer is never
    shared.  By this model no choice is slower than sharing nothing: each takes what it gains, and leaves the nodes
    above fewer consumers, never more.

    Where tiles read (``read_by_tiles``), a node whose consumers fill their tiles is not shared either, for its own
    tiles would be as many: its tokens join theirs, and each query has one partial state less.

    If no query takes the tile path anyway, all that has one price more, ``tile_path``: where what is shared in tiles
    spares no more in all, each of its consumers reads it.

    With ``paths`` the same is decided for each heavy path, by consumers: neighbouring shared nodes of one are read as
    one list, at the price of the first of them.

    Of a node only what some query sees by ``visible`` counts, and its consumers are those that see some of it.

    Returns:
        ``[nodes]`` True where the node is shared; False also where no query sits below.
    """
    snapshot, by_token = tree.snapshot, cost.kv_byte * shape.kv_bytes
    reads = _reads(tree, shape, cost, visible, by_tiles=not paths)
    if paths:
        shared = share_paths(snapshot, reads.most, reads.length, reads.price, by_token)
    else:
        shared = _share_nodes(tree, reads, by_token)
    nodes = head = np.flatnonzero(shared)
    if paths:  # of each path's part the first node
        _, first, part = np.unique(snapshot.subtree_end[nodes], return_index=True, return_inverse=True)
        head = nodes[first[part]]
    in_tiles = tree.below[head] * shape.gqa_group > cost.decode_heads
    takes_tiles = tree.own_rows.max(initial=0) * shape.gqa_group > cost.decode_heads
    if not takes_tiles and in_tiles.any():
        spared = reads.spared_by(tree, shared, nodes[in_tiles], head[in_tiles])
        if not any(tokens * by_token > cost.tile_path for tokens in spared):
            shared[nodes[in_tiles]] = False
    return shared


def _share_nodes(tree: StepTree, reads: _Reads, by_token: float) -> NDArray[np.bool_]:
    """``[nodes]`` the decision node by node."""
    snapshot = tree.snapshot
    shared = np.zeros(snapshot.num_nodes, dtype=bool)
    candidate = reads.may_gain(tree, by_token)
    nodes = np.flatnonzero(candidate)
    if not len(nodes):
        return shared
    marked = mark(snapshot.subtree_end, candidate)
    rank, nearest = marked.above[nodes], marked.nearest(nodes)
    above = np.where(nearest >= 0, np.searchsorted(nodes, nearest), len(nodes))
    few = len(nodes) <= 24 * (int(rank.max()) + 1)
    some = reads.some(nodes)
    shared[nodes] = _share_one_by_one(some, above, by_token) if few else _share_by_level(some, above, by_token, rank)
    return shared


def may_share(tree: StepTree, shape: HeadShape, cost: CostModel) -> NDArray[np.bool_]:
    """``[nodes]`` False where :func:`decide_sharing` without paths cannot share a node, whatever it decides for those
    below.
    """
    return _reads(tree, shape, cost, ALL, by_tiles=True).may_gain(tree, cost.kv_byte * shape.kv_bytes)


def may_begin_part(tree: StepTree, shape: HeadShape, cost: CostModel) -> NDArray[np.bool_]:
    """``[nodes]`` True for one node of each path of which :func:`decide_sharing` may share a part: none above it."""
    return may_begin(tree.snapshot, *_consumers(tree, shape, cost, ALL), cost.kv_byte * shape.kv_bytes)


@dataclass(frozen=True, eq=False)
class _Reads:
    """How often nodes are read.

    Attributes:
        most: Times each is read if neither it nor a node below is shared.
        once: Times each is read if it is shared.
        length: Tokens that a read fewer spares.
        price: What sharing each costs besides.
    """

    most: Longs
    once: Longs
    length: Ints | Longs
    price: NDArray[np.float64]

    def some(self, nodes: Longs) -> _Reads:
        return _Reads(self.most[nodes], self.once[nodes], self.length[nodes], self.price[nodes])

    def spared_by(self, tree: StepTree, shared: NDArray[np.bool_], nodes: Longs, head: Longs) -> Iterator[int]:
        """Tokens that are read less often than if nothing were shared, of ``nodes``, which are ``shared`` in parts with
        these heads; then more and more with those above that join the lists of these.
        """
        spared = self.most - self.once
        tokens = int(spared[nodes] @ self.length[nodes].astype(np.int64))
        yield tokens
        at = np.unique(head)
        times = spared[at]
        while len(joins := np.flatnonzero((above := tree.snapshot.parent[at]) >= 0)):
            joins = joins[~shared[above[joins]]]
            at, times = above[joins].astype(np.int64), times[joins]
            tokens += int(times @ self.length[at].astype(np.int64))
            yield tokens

    def may_gain(self, tree: StepTree, by_token: float) -> NDArray[np.bool_]:
        """Which would gain if nothing below were shared: where all these reads gain nothing, fewer do neither."""
        gains: NDArray[np.bool_] = (tree.below > 0) & ((self.most - self.once) * self.length * by_token > self.price)
        return gains


def _reads(tree: StepTree, shape: HeadShape, cost: CostModel, visible: Visible, *, by_tiles: bool) -> _Reads:
    """Of all nodes.  Of what queries see of a node no tile tells: there consumers are counted."""
    most, length, price = _consumers(tree, shape, cost, visible)
    if visible.limits or not (cost.read_by_tiles and by_tiles):
        return _Reads(most, np.ones_like(most), length, price)
    own = np.concatenate(([0], np.cumsum(_tiles(tree.own_rows, shape, cost))))
    below = _tiles(tree.below, shape, cost)
    return _Reads(own[tree.snapshot.subtree_end] - own[1:], below, length, price)


def _tiles(queries: Ints | Longs, shape: HeadShape, cost: CostModel) -> Longs:
    """Tiles, or decode items, that this number of queries of each node takes."""
    tiles = -(-queries.astype(np.int64) // max(1, cost.tile_heads // shape.gqa_group))
    return np.where(queries * shape.gqa_group <= cost.decode_heads, queries > 0, tiles)


def _consumers(
    tree: StepTree, shape: HeadShape, cost: CostModel, visible: Visible
) -> tuple[Longs, Ints | Longs, NDArray[np.float64]]:
    """``[nodes]`` the consumers of each node if nothing below is shared, the tokens that each of these but one would
    not read, and the price of sharing it.
    """
    snapshot, below = tree.snapshot, tree.below
    tiles = -(-below // max(1, cost.tile_heads // shape.gqa_group)) * np.float64(cost.tile_item * shape.kv_heads)
    tiles = np.where(below * shape.gqa_group <= cost.decode_heads, cost.decode_item * shape.kv_heads, tiles)
    price: NDArray[np.float64] = cost.item + tiles + below * (cost.partial_byte * shape.partial_bytes)
    if visible.limits:
        return *_seeing(tree, visible), price
    owners = np.concatenate(([0], np.cumsum(tree.own_rows > 0)))
    return owners[snapshot.subtree_end] - owners[1:], snapshot.length, price


def _seeing(tree: StepTree, visible: Visible) -> tuple[Longs, Longs]:
    """``[nodes]`` how many own-node rows below see some of each node, and the mean tokens that each but one would not
    read if it were shared: what they see, less what the one that sees most of it sees.
    """
    snapshot, queries = tree.snapshot, tree.queries
    begin = visible.begin(snapshot.start[queries.node].astype(np.int64) + queries.begin)
    end = snapshot.start.astype(np.int64) + snapshot.length
    seen = end if visible.until is None else np.minimum(end, visible.until)
    most, total, widest = np.zeros((3, snapshot.num_nodes), dtype=np.int64)
    node = snapshot.parent[queries.node]
    # From node to node towards the roots, until nothing is in sight.
    while len(at := np.flatnonzero((node >= 0) & (end[node] > begin))):
        node, begin = node[at], begin[at]
        tokens = np.maximum(seen[node] - np.maximum(begin, snapshot.start[node]), 0)
        np.add.at(most, node, tokens > 0)
        np.add.at(total, node, tokens)
        np.maximum.at(widest, node, tokens)
        node = snapshot.parent[node]
    return most, (total - widest) // np.maximum(most - 1, 1)


def _share_by_level(reads: _Reads, above: Longs, by_token: float, rank: Longs) -> NDArray[np.bool_]:
    """The decision for candidates, from the deepest level up: for trees with many nodes in each level.

    ``above`` is the nearest candidate above, or their number if there is none; ``rank`` says how many there are.
    """
    most, once = reads.most, reads.once
    shared = np.zeros(len(most), dtype=bool)
    spared = np.zeros(len(most) + 1, dtype=np.int64)  # of `most`, by what is shared below
    order = np.argsort(rank, kind="stable")
    bounds = np.searchsorted(rank[order], np.arange(rank.max() + 2))
    for level in range(len(bounds) - 2, -1, -1):
        here = order[bounds[level] : bounds[level + 1]]
        saved = (most[here] - spared[here] - once[here]) * reads.length[here]
        shared[here] = saved * by_token > reads.price[here]
        np.add.at(spared, above[here], np.where(shared[here], most[here] - once[here], spared[here]))
    return shared


def _share_one_by_one(reads: _Reads, above: Longs, by_token: float) -> NDArray[np.bool_]:
    """The same, node by node: for few nodes, and for deep trees."""
    columns = [of.tolist() for of in (reads.most, reads.once, reads.length, reads.price, above)]
    shared, spared = [False] * len(above), [0] * (len(above) + 1)
    for here, most, once, tokens, price, parent in zip(
        range(len(above) - 1, -1, -1), *(column[::-1] for column in columns), strict=True
    ):
        shared[here] = (most - spared[here] - once) * tokens * by_token > price
        spared[parent] += most - once if shared[here] else spared[here]
    return np.array(shared)
