"""Random trees for tests of planners: any shape and lengths, with queries in some nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from prefixkit.attention.bsr import BSR, MaskKind, decompose_unchecked
from prefixkit.attention.gpu.capacity import OVERFLOW, PlanCapacity
from prefixkit.attention.gpu.gpu_cost import H200, GpuCost
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.paths.runs import runs_of
from prefixkit.attention.plan import KINDS, Plan
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import DECODE_ROWS, CostModel, HeadShape
from prefixkit.attention.visible import ALL, Visible
from prefixkit.testing.forests import make_snapshot, random_parents
from prefixkit.tree.arrays import Ints, ranges
from prefixkit.tree.snapshot import TreeSnapshot

HEADS = ((1, 1), (8, 1), (32, 8), (32, 32), (6, 2), (64, 1), (40, 2), (32, 2), (12, 1))


def tree(parents: list[int], lengths: list[int]) -> TreeSnapshot:
    """A tree in depth-first order, every node on pages of its own, in order."""
    return make_snapshot(np.random.default_rng(0), parents, lengths, 16, orderly=True)[0]


def random_shape(rng: np.random.Generator) -> HeadShape:
    return HeadShape(*HEADS[rng.integers(len(HEADS))], int(rng.choice([64, 128])), 2)


def random_cost(rng: np.random.Generator) -> GpuCost:
    """The costs of an H200, or costs that share and split much in small trees."""
    sharing = CostModel(float(rng.choice([0, 0.02, 2])), 1 / 4.3e6, float(rng.choice([0, 1e-8, 3.5e-7])))
    sharing = replace(sharing, tile_item=float(rng.choice([0, 0.022])), decode_item=float(rng.choice([0, 0.003])))
    sharing = replace(sharing, tile_heads=int(rng.choice([64, 128])), decode_heads=int(rng.choice([8, 16])))
    sharing = replace(sharing, read_by_tiles=int(rng.integers(2)), tile_path=float(rng.choice([0, 0.3, 3])))
    low = sharing.tile_heads // 2 * int(rng.integers(2))
    if rng.random() < 0.5:
        return replace(H200, sharing=sharing, low_tile_heads=low)
    tile = replace(H200.tile, kv_tile=int(rng.choice([4, 64])), start=float(rng.choice([0, 1.37])), merge=0.01)
    decode = replace(H200.decode, kv_tile=2, write=0.1, merge=0.0, least=1)
    return GpuCost(sharing, tile, decode, low)


def random_tree(
    rng: np.random.Generator, nodes: int, longest: int, rows: int, density: float
) -> tuple[TreeSnapshot, Queries]:
    """A forest of ``nodes`` nodes of up to ``longest`` tokens, with up to ``rows`` queries at the end of some nodes."""
    parents = random_parents(rng, nodes)
    lengths = rng.integers(0, longest, nodes)
    count = rng.integers(1, rows + 1, nodes) * (rng.random(nodes) < density)
    count[-1] = max(count[-1], 1)
    lengths = np.maximum(lengths, count)
    snapshot, _ = make_snapshot(rng, parents, lengths.tolist(), 16, orderly=True)
    node = np.flatnonzero(count)
    return snapshot, Queries(*(a.astype(np.int32) for a in (node, (lengths - count)[node], lengths[node])))


def deep_tree(rng: np.random.Generator, nodes: int) -> StepTree:
    """A comb or a search tree of up to ``nodes`` nodes, some of them adjacent in memory and some without tokens, with
    queries at the ends of leaves and of some inner nodes; in a few trees, positions before some nodes are skipped.
    """
    count = int(rng.integers(2, nodes))
    parents = _comb(rng, count) if rng.random() < 0.5 else _search(rng, count)
    lengths = rng.integers(rng.integers(2), int(rng.choice([2, 6, 60, 400])), count)
    leaf = np.bincount(np.array(parents) + 1, minlength=count + 1)[1:] == 0
    asks = rng.random(count) < np.where(leaf, 0.95, rng.choice([0, 0.3]))
    rows = rng.integers(1, int(rng.choice([2, 4, 40])), count) * asks
    rows[-1] = max(rows[-1], 1)
    lengths = np.maximum(lengths, rows)
    size, orderly = int(rng.choice([1, 4, 16])), bool(rng.random() < 0.4)
    snapshot, _ = make_snapshot(rng, parents, lengths.tolist(), size, orderly=orderly)
    for node in rng.integers(count, size=int(rng.integers(1, 4)) if rng.random() < 0.3 else 0).tolist():
        snapshot.start[node : snapshot.subtree_end[node]] += int(rng.integers(1, 9))
    node = np.flatnonzero(rows)
    columns = node, (lengths - rows)[node], lengths[node]
    return StepTree(snapshot, Queries(*(column.astype(np.int32) for column in columns)))


def random_visible(rng: np.random.Generator) -> Visible:
    """All tokens, a window, chunks, or a window and chunks without the first tokens."""
    size = int(rng.integers(1, int(rng.choice([8, 100, 2000]))))
    some = ALL, Visible(window=size), Visible(chunk=size), Visible(size, 2 * size, first=int(rng.integers(9)))
    return some[rng.integers(len(some))]


def _comb(rng: np.random.Generator, nodes: int) -> list[int]:
    """A spine with up to two leaves at each of its nodes."""
    parents, spine = [-1], 0
    while len(parents) < nodes:
        parents += [spine] * int(rng.integers(1, 4))
        spine = len(parents) - 1
    return parents[:nodes]


def _search(rng: np.random.Generator, nodes: int) -> list[int]:
    """Each node below any of those before it; in most trees the heaviest child is the last."""
    children: list[list[int]] = [[] for _ in range(nodes)]
    for node in range(1, nodes):
        children[rng.integers(node)].append(node)
    weight = np.ones(nodes, dtype=np.int64)
    for node in range(nodes - 1, -1, -1):
        weight[node] += sum(int(weight[child]) for child in children[node])
    ordered = rng.random() < 0.8
    parents, stack = list[int](), [(0, -1)]
    while stack:
        node, above = stack.pop()
        parents.append(above)
        below = sorted(children[node], key=lambda child: -weight[child]) if ordered else children[node]
        stack += [(child, len(parents) - 1) for child in below]
    return parents


def specified(
    snapshot: TreeSnapshot,
    queries: Queries,
    shape: HeadShape,
    cost: GpuCost,
    num_sms: int,
    *,
    paths: bool = False,
    tiles: Visible = ALL,
) -> Plan:
    """The plan that any planner must make; ``paths``: by heavy paths, whose tiles read the tokens seen by ``tiles``."""
    tree, runs = StepTree(snapshot, queries), runs_of(snapshot) if paths else None
    formats = [decompose_unchecked(tree, shape, cost.sharing, paths=paths, runs=runs, tiles=tiles)]
    return make_gpu_plan(formats, tree.length, queries.num_rows, shape, num_sms, cost)


def held_by(work: Sequence[Tensor]) -> list[Ints]:
    """A plan's arrays on the host, cut to their used part."""
    counts, tile_items, decode_items, segments, merge_indptr, merge_indices, limits = (x.cpu().numpy() for x in work)
    assert not counts[OVERFLOW]
    tile_items, decode_items = tile_items[: counts[0]], decode_items[: counts[1]]
    items = np.concatenate((tile_items, decode_items))
    used = int((items[:, 3] + items[:, 4] // KINDS).max(initial=0))
    lists = segments[:used], merge_indptr[: counts[2] + 1], merge_indices[: counts[3]]
    limited = len(items) and (items[:, 4] % KINDS == MaskKind.LIMIT).any()
    return [counts, tile_items, decode_items, *lists, limits[: counts[3] if limited else 0]]


def narrowed(rows: BSR, group: int, most: int = DECODE_ROWS) -> BSR:
    """The same rows cut to so few queries that every item is a decode item of ``most`` rows, at least one group."""
    step, queries = most // group, rows.q_end - rows.q_begin
    count = -(-queries // step)
    row = np.repeat(np.arange(len(rows.kind)), count)
    begin = (rows.q_begin[row] + step * ranges(np.zeros_like(count), count)).astype(np.int32)
    segments = np.diff(rows.indptr)[row]
    which = ranges(rows.indptr[:-1][row], segments)
    return replace(
        rows,
        q_begin=begin,
        q_end=np.minimum(begin + step, rows.q_end[row]),
        kind=rows.kind[row],
        indptr=np.concatenate(([0], np.cumsum(segments))).astype(np.int32),
        node=rows.node[which],
        begin=rows.begin[which],
        end=rows.end[which],
        first=rows.first[row],
        last=rows.last[row],
    )


def size_of(plan: Plan) -> PlanCapacity:
    """The capacity that a plan needs."""
    return PlanCapacity(len(plan.tile_items), len(plan.decode_items), len(plan.segments), *plan.counts[2:4].tolist())
