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

# Default maxima of query heads (queries x GQA group): of a decode item, and of a tile.
DECODE_ROWS, TILE_ROWS = 8, 128


@dataclass(frozen=True)
class CostModel:
    """What the parts of one layer's attention cost, in microseconds.

    Attributes:
        item: One more work item: launching it, or one more library call.
        kv_byte: Reading one byte of K or V.
        partial_byte: Writing one byte of a partial state and reading it back to merge it.
        tile_item, decode_item: In addition to ``item``, each shared-prefix tile for each KV head: ``tile_item`` for a
            tile of ``tile_heads`` query heads, ``decode_item`` if ``decode_heads`` hold all of the node's.
        tile_path: The extra time of a launch with tile items over one without.  If only sharing would make tile items,
            nodes are shared in tiles only if that saves more in total.
        tile_heads: Query heads of the kernels' largest tile.
        decode_heads: The most query heads of a decode item; fewer than ``tile_heads``.
        read_by_tiles: 1 if each tile of a node reads the node's tokens, as on a GPU: an unshared node is then read by
            each tile of its consumers.  0 if one item reads them for all queries.
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


# One thread of a 2.6 GHz x86 server core, float32: gathering and reading an unshared token of 1.5 KB takes 0.1 us, an
# extra item 30 us, an extra partial row of 2.3 KB 0.7 us.
CPU_COST = CostModel(item=30.0, kv_byte=6.5e-5, partial_byte=3e-4)


@dataclass(frozen=True)
class HeadShape:
    """The attention heads of one layer: the facts that costs and tiles depend on.

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

    A shared node costs one more item, its tiles, and one more partial state for each query below.  An unshared node is
    read again by each of its consumers: the rows of descendants that its tokens join.  The choice is made bottom-up,
    because the choices for a node's children determine its number of consumers.  A node with one consumer is never
    shared.  In this model no choice is slower than sharing nothing: each saves time by itself, and leaves the nodes
    above with fewer consumers, never more.

    If each tile reads its tokens (``read_by_tiles``), a node whose consumers fill their tiles is not shared either: its
    own tiles would be as many, and unshared its tokens join theirs, with one partial state less for each query.

    If no query takes the tile path anyway, sharing in tiles costs ``tile_path`` in addition: unless it saves more in
    total, the consumers read these nodes instead.

    With ``paths`` the same is decided for each heavy path, by consumers: consecutive shared nodes of a path are read as
    one list, at the price of the first node.

    Only tokens of a node that some query sees under ``visible`` count, and only rows that see some are consumers.

    Returns:
        ``[nodes]`` True where the node is shared; False also if no query is below it.
    """
    snapshot, by_token = tree.snapshot, cost.kv_byte * shape.kv_bytes
    reads = _reads(tree, shape, cost, visible, by_tiles=not paths)
    if paths:
        shared = share_paths(snapshot, reads.most, reads.length, reads.price, by_token)
    else:
        shared = _share_nodes(tree, reads, by_token)
    nodes = head = np.flatnonzero(shared)
    if paths:  # the first node of each path's part
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
    """``[nodes]`` True where the node is shared, decided node by node."""
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
    """``[nodes]`` False where :func:`decide_sharing` without paths cannot share the node, whatever it decides for nodes
    below.
    """
    return _reads(tree, shape, cost, ALL, by_tiles=True).may_gain(tree, cost.kv_byte * shape.kv_bytes)


def may_begin_part(tree: StepTree, shape: HeadShape, cost: CostModel) -> NDArray[np.bool_]:
    """``[nodes]`` True for the first node of each path at which a part that :func:`decide_sharing` shares may begin."""
    return may_begin(tree.snapshot, *_consumers(tree, shape, cost, ALL), cost.kv_byte * shape.kv_bytes)


@dataclass(frozen=True, eq=False)
class _Reads:
    """How often nodes are read.

    Attributes:
        most: Times each node is read if neither it nor a node below it is shared.
        once: Times each node is read if it is shared.
        length: Tokens that are saved for each time a node is read less.
        price: What sharing each node costs apart from reading it.
    """

    most: Longs
    once: Longs
    length: Ints | Longs
    price: NDArray[np.float64]

    def some(self, nodes: Longs) -> _Reads:
        return _Reads(self.most[nodes], self.once[nodes], self.length[nodes], self.price[nodes])

    def spared_by(self, tree: StepTree, shared: NDArray[np.bool_], nodes: Longs, head: Longs) -> Iterator[int]:
        """Token reads saved against sharing nothing: by ``nodes``, which are shared in parts with these heads; then
        also by the unshared nodes above that join the parts' lists, more of them each time.
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
        """``[nodes]`` True if sharing gains while no node below is shared: with fewer reads it cannot gain more."""
        gains: NDArray[np.bool_] = (tree.below > 0) & ((self.most - self.once) * self.length * by_token > self.price)
        return gains


def _reads(tree: StepTree, shape: HeadShape, cost: CostModel, visible: Visible, *, by_tiles: bool) -> _Reads:
    """The reads of all nodes.  With a visible range, tiles do not tell what is seen: consumers are counted instead."""
    most, length, price = _consumers(tree, shape, cost, visible)
    if visible.limits or not (cost.read_by_tiles and by_tiles):
        return _Reads(most, np.ones_like(most), length, price)
    own = np.concatenate(([0], np.cumsum(_tiles(tree.own_rows, shape, cost))))
    below = _tiles(tree.below, shape, cost)
    return _Reads(own[tree.snapshot.subtree_end] - own[1:], below, length, price)


def _tiles(queries: Ints | Longs, shape: HeadShape, cost: CostModel) -> Longs:
    """Tiles or decode items for these numbers of queries of each node."""
    tiles = -(-queries.astype(np.int64) // max(1, cost.tile_heads // shape.gqa_group))
    return np.where(queries * shape.gqa_group <= cost.decode_heads, queries > 0, tiles)


def _consumers(
    tree: StepTree, shape: HeadShape, cost: CostModel, visible: Visible
) -> tuple[Longs, Ints | Longs, NDArray[np.float64]]:
    """``[nodes]`` the consumers of each node if no node below is shared, the tokens that sharing saves for each
    consumer but one, and the price of sharing.
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
    """``[nodes]`` how many own-node rows below see tokens of each node, and the mean tokens that sharing saves for each
    row but one: the tokens that all rows see, less those of the row that sees most, by row.
    """
    snapshot, queries = tree.snapshot, tree.queries
    begin = visible.begin(snapshot.start[queries.node].astype(np.int64) + queries.begin)
    end = snapshot.start.astype(np.int64) + snapshot.length
    seen = end if visible.until is None else np.minimum(end, visible.until)
    most, total, widest = np.zeros((3, snapshot.num_nodes), dtype=np.int64)
    node = snapshot.parent[queries.node]
    # From node to parent, while queries see tokens of the node.
    while len(at := np.flatnonzero((node >= 0) & (end[node] > begin))):
        node, begin = node[at], begin[at]
        tokens = np.maximum(seen[node] - np.maximum(begin, snapshot.start[node]), 0)
        np.add.at(most, node, tokens > 0)
        np.add.at(total, node, tokens)
        np.maximum.at(widest, node, tokens)
        node = snapshot.parent[node]
    return most, (total - widest) // np.maximum(most - 1, 1)


def _share_by_level(reads: _Reads, above: Longs, by_token: float, rank: Longs) -> NDArray[np.bool_]:
    """Decide for candidates level by level, the deepest first: for trees with many nodes in each level.

    ``above`` is the nearest candidate above each, or the number of candidates if there is none; ``rank`` says how many
    candidates are above each.
    """
    most, once = reads.most, reads.once
    shared = np.zeros(len(most), dtype=bool)
    spared = np.zeros(len(most) + 1, dtype=np.int64)  # how much sharing below reduces `most`
    order = np.argsort(rank, kind="stable")
    bounds = np.searchsorted(rank[order], np.arange(rank.max() + 2))
    for level in range(len(bounds) - 2, -1, -1):
        here = order[bounds[level] : bounds[level + 1]]
        saved = (most[here] - spared[here] - once[here]) * reads.length[here]
        shared[here] = saved * by_token > reads.price[here]
        np.add.at(spared, above[here], np.where(shared[here], most[here] - once[here], spared[here]))
    return shared


def _share_one_by_one(reads: _Reads, above: Longs, by_token: float) -> NDArray[np.bool_]:
    """Decide for candidates node by node: for few nodes, and for deep trees."""
    columns = [of.tolist() for of in (reads.most, reads.once, reads.length, reads.price, above)]
    shared, spared = [False] * len(above), [0] * (len(above) + 1)
    for here, most, once, tokens, price, parent in zip(
        range(len(above) - 1, -1, -1), *(column[::-1] for column in columns), strict=True
    ):
        shared[here] = (most - spared[here] - once) * tokens * by_token > price
        spared[parent] += most - once if shared[here] else spared[here]
    return np.array(shared)
