"""Sharing and decomposition node by node, as one would explain them: what the fast code must equal."""

from __future__ import annotations

import numpy as np

from prefixkit.attention.bsr import BSR, OPEN
from prefixkit.attention.queries import Queries


def decide_sharing(snapshot, own, below, shape, cost):
    """Bottom-up: a node is shared where reading it once saves more than its item, tiles and partial states cost.

    By tiles "once" is as often as it has tiles, and a consumer reads it as often as that has.  Nothing is shared in
    tiles where all that together saves no more than their path costs, unless own queries of some node take it anyway.
    """
    gain_per_token, price_per_row = cost.kv_byte * shape.kv_bytes, cost.partial_byte * shape.partial_bytes
    decode, tile, rows_per_tile = (
        cost.decode_item * shape.kv_heads,
        cost.tile_item * shape.kv_heads,
        max(1, 128 // shape.gqa_group),
    )
    parent, length, own, below = (a.tolist() for a in (snapshot.parent, snapshot.length, own, below))

    def reads(queries):
        tiles = 1 if queries * shape.gqa_group <= 8 or not cost.read_by_tiles else -(-queries // rows_per_tile)
        return tiles if queries else 0

    def by_rows(node):
        """How often own-node rows would read it."""
        return sum(map(reads, own[node + 1 : snapshot.subtree_end[node]]))

    def tokens_of_list(node):
        """Its own and those of unshared ancestors, up to a shared one."""
        above = parent[node]
        return length[node] + (tokens_of_list(above) if above >= 0 and not shared[above] else 0)

    consumers = [0] * len(parent)
    shared = np.zeros(len(parent), dtype=bool)
    for node in range(len(parent) - 1, -1, -1):
        gain = (consumers[node] - reads(below[node])) * length[node] * gain_per_token
        tiles = decode if below[node] * shape.gqa_group <= 8 else -(-below[node] // rows_per_tile) * tile
        price = cost.item + tiles + below[node] * price_per_row
        if below[node] and gain > price:
            shared[node] = True
        if parent[node] >= 0:
            consumers[parent[node]] += (reads(below[node]) if shared[node] else consumers[node]) + reads(own[node])
    in_tiles = [node for node in np.flatnonzero(shared).tolist() if below[node] * shape.gqa_group > 8]
    spared = sum((by_rows(node) - reads(below[node])) * tokens_of_list(node) for node in in_tiles)
    if max(own) * shape.gqa_group <= 8 and spared * gain_per_token <= cost.tile_path:
        shared[in_tiles] = False
    return shared


def decompose(snapshot, queries: Queries, shape, cost, shared=None) -> BSR:
    """Top-down: what is not shared is handed to the first rows below."""
    own = np.zeros(snapshot.num_nodes, dtype=np.int32)
    own[queries.node] = queries.end - queries.begin
    row_of_node = np.concatenate(([0], np.cumsum(own)))
    below = row_of_node[snapshot.subtree_end] - row_of_node[1:]
    if shared is None:
        shared = decide_sharing(snapshot, own, below, shape, cost)
    handed_down: list[list[tuple[int, int, int]]] = [[] for _ in own]
    rows = []
    for node, above in enumerate(snapshot.parent.tolist()):
        inherited = handed_down[above] if above >= 0 else []
        first, end, length = int(row_of_node[node]), int(row_of_node[node + 1]), int(snapshot.length[node])
        if shared[node] and below[node]:
            rows.append((end, end + int(below[node]), False, [*inherited, (node, 0, length)]))
        else:
            handed_down[node] = [*inherited, (node, 0, length)] if length else inherited
        if own[node]:
            rows.append((first, end, True, [*inherited, (node, 0, OPEN)]))
    return _pack(rows, snapshot.start, snapshot.length)


def _pack(rows, start, length):
    segments = np.array([segment for row in rows for segment in row[3]], dtype=np.int32)
    q_begin, q_end, causal = (np.array(column) for column in list(zip(*rows, strict=True))[:3])
    indptr = np.cumsum([0, *(len(row[3]) for row in rows)])
    kind, first = causal.astype(np.int32), np.array([start[row[3][0][0]] for row in rows], dtype=np.int32)
    last = np.array([start[row[3][-1][0]] + length[row[3][-1][0]] - 1 for row in rows], dtype=np.int32)
    return BSR(
        q_begin.astype(np.int32), q_end.astype(np.int32), kind, indptr.astype(np.int32), *segments.T, first, last
    )
