"""Sharing and decomposition by heavy paths, node by node: what the fast code must equal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.bsr import OPEN
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CostModel, HeadShape
from prefixkit.tree.snapshot import TreeSnapshot

Segment = tuple[int, int, int]
# First and last query row, kind by its number, segments, limits.
Row = tuple[int, int, int, list[Segment], list[int]]


def paths_of(snapshot: TreeSnapshot) -> list[list[int]]:
    """Each from its top down, in the order of their first nodes."""
    paths: dict[int, list[int]] = {}
    for node, end in enumerate(snapshot.subtree_end.tolist()):
        paths.setdefault(end, []).append(node)
    return sorted(paths.values())


def consumers_of(snapshot: TreeSnapshot, own: list[int], path: list[int], demand: dict[int, int]) -> list[int]:
    """How many BSR rows read each node of a path if it is not shared: ``demand`` says how many come of the others."""
    found, so_far = [], 0
    for at in range(len(path) - 1, -1, -1):
        if at + 1 < len(path):
            so_far += own[path[at + 1]] > 0
        light = [node for node in demand if snapshot.parent[node] == path[at] and node not in path]
        so_far += sum(demand[node] for node in light)
        found.append(so_far)
    return found[::-1]


def decide_paths(tree: StepTree, shape: HeadShape, cost: CostModel) -> NDArray[np.bool_]:
    """Bottom-up, path by path: a part begins where it gains most, and ends with the last node of two consumers.

    No part takes tiles where all those that do save no more than their path costs, unless own queries of some node do.
    """
    snapshot, own, below = tree.snapshot, tree.own_rows.tolist(), tree.below.tolist()
    by_token, by_row = cost.kv_byte * shape.kv_bytes, cost.partial_byte * shape.partial_bytes
    rows_per_tile = max(1, cost.tile_heads // shape.gqa_group)
    shared, demand = np.zeros(snapshot.num_nodes, dtype=bool), dict[int, int]()
    in_tiles, heads = list[int](), set[int]()
    for path in reversed(paths_of(snapshot)):
        consumers = consumers_of(snapshot, own, path, demand)
        best, begin = 0.0, -1
        for at in range(len(path) - 1, -1, -1):
            saved = sum(
                max(count - 1, 0) * int(snapshot.length[node])
                for count, node in zip(consumers[at:], path[at:], strict=True)
            )
            rows = below[path[at]]
            tiles = -(-rows // rows_per_tile) * (cost.tile_item * shape.kv_heads)
            tiles = cost.decode_item * shape.kv_heads if rows * shape.gqa_group <= 8 else tiles
            gain = saved * by_token - (cost.item + tiles + rows * by_row)
            if gain > best:
                best, begin = gain, at
        left = consumers[0]
        if begin >= 0:
            end = max(at for at, count in enumerate(consumers) if count > 1)
            shared[path[begin : end + 1]] = True
            left = consumers[0] - consumers[begin] + 1
            if below[path[begin]] * shape.gqa_group > 8:
                in_tiles += path[begin : end + 1]
                heads.add(path[begin])
        demand[path[0]] = left + (own[path[0]] > 0)
    spared = 0
    for node in in_tiles:
        times = sum(own[other] > 0 for other in range(node + 1, snapshot.subtree_end[node])) - 1
        spared += times * int(snapshot.length[node])
        above = int(snapshot.parent[node]) if node in heads else -1
        while above >= 0 and not shared[above]:  # joins the part's list
            spared, above = spared + times * int(snapshot.length[above]), int(snapshot.parent[above])
    if max(own) * shape.gqa_group <= 8 and spared * by_token <= cost.tile_path:
        shared[in_tiles] = False
    return shared


def rows_by_paths(tree: StepTree, shared: NDArray[np.bool_]) -> list[Row]:
    """Top-down: what is not shared is handed to the first rows below; shared neighbours on a path are one row."""
    snapshot, first_row = tree.snapshot, tree.first_row.tolist()
    handed_down: list[list[Segment]] = [[] for _ in shared]
    rows: list[Row] = []
    shared = shared & (tree.below > 0)
    of_path = {node: path for path in paths_of(snapshot) for node in path}
    for node, above in enumerate(snapshot.parent.tolist()):
        inherited, length = handed_down[above] if above >= 0 else [], int(snapshot.length[node])
        if shared[node]:
            path = of_path[node]
            at = path.index(node)
            if not (at and _goes_on(snapshot, shared, path[at - 1], node)):
                after = range(at + 1, len(path))
                end = next((i for i in after if not _goes_on(snapshot, shared, path[i - 1], path[i])), len(path))
                rows.append(_shared_row(tree, path[at:end], inherited))
        else:
            handed_down[node] = [*inherited, (node, 0, length)] if length else inherited
        if tree.own_rows[node]:
            rows.append((first_row[node], first_row[node + 1], 1, [*inherited, (node, 0, OPEN)], []))
    return rows


def _goes_on(snapshot: TreeSnapshot, shared: NDArray[np.bool_], above: int, node: int) -> bool:
    """Whether two shared nodes of a path are of one part: no token is missing between them."""
    return bool(
        shared[above] and shared[node] and snapshot.start[node] == snapshot.start[above] + snapshot.length[above]
    )


def _shared_row(tree: StepTree, part: list[int], inherited: list[Segment]) -> Row:
    snapshot, first_row = tree.snapshot, tree.first_row.tolist()
    begin, end = first_row[part[0] + 1], first_row[snapshot.subtree_end[part[0]]]
    limits, leaves_below = [], []
    for query in range(begin, end):
        node = int(np.searchsorted(first_row, query, side="right")) - 1
        above = int(snapshot.parent[node])
        while above not in part:
            above = int(snapshot.parent[above])
        leaves_below.append(above)
        limits.append(int(snapshot.start[above] + snapshot.length[above]) - 1)
    whole = leaves_below[0] == part[-1]
    segments = [*inherited, *((node, 0, int(snapshot.length[node])) for node in part)]
    return begin, end, 0 if whole else 2, segments, [] if whole else limits
