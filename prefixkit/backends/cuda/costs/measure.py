"""Timing attention on synthetic trees, for calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from prefixkit.attention.bsr import decompose
from prefixkit.attention.gpu.gpu_cost import H200, GpuCost, Role
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.gpu.staging import upload
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import DECODE_ROWS, TILE_ROWS, HeadShape
from prefixkit.ops import library as ops  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.tree.snapshot import TreeSnapshot

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
GROUP = HEADS // KV_HEADS
REPEATS, CALLS = 5, 4


@dataclass(frozen=True)
class Point:
    """One measurement of a path: KV tiles, items and written states of each worker, and its microseconds."""

    tiles: float
    items: float
    states: float
    us: float


@dataclass(frozen=True)
class Shared:
    """One forest, measured with its roots shared and with nothing shared: the costs and the savings of sharing."""

    kind: int  # forests of a kind have the same heads
    tile: float  # tiles of all shared roots, for each KV head
    decode: float
    partial_bytes: float  # of the partial states that they write
    spared_bytes: float  # of KV that sharing spares
    shared_us: float
    unshared_us: float


class Memory:
    """Pages for all measurements: more than the L2 cache holds, so each call of a measurement reads other pages."""

    def __init__(self, device: torch.device, num_sms: int) -> None:
        self.device, self.num_sms = device, num_sms
        tokens = 256 * H200.decode.workers * num_sms
        self.pages = tokens // PAGE
        shape = (self.pages, KV_HEADS, PAGE, HEAD_DIM)
        self.k, self.v = (torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")

    def measure(self, role: Role, queries: int, rounds: int, tokens: int, parts: int) -> Point:
        """Time rows of ``queries`` queries over ``parts`` nodes of ``tokens`` tokens, an item for each node."""
        workers = role.workers * self.num_sms
        count = max(1, rounds * workers // (KV_HEADS * parts))
        tree = _forest(count, range(-1, parts - 1), [tokens] * parts, queries)
        us = self._time(tree, tree.below > 0, HEADS, KV_HEADS, _unsplit(role))
        items = np.ceil(count * parts * KV_HEADS / workers)  # items of the busiest worker
        return Point(items * -(-tokens // role.kv_tile), items, items * (parts > 1), us)

    def compare(self, kind: int, heads: int, kv_heads: int, roots: int, leaves: int, tokens: int, leaf: int) -> Shared:
        """Time a forest of ``roots`` with ``leaves`` each, one query at each leaf's end, with and without sharing."""
        tree = _forest(roots, [-1, *[0] * leaves], [tokens, *[leaf] * leaves], 1)
        is_root = tree.below > 0
        times = [self._time(tree, shared, heads, kv_heads, H200) for shared in (is_root, is_root & False)]
        tiles = -(-leaves // (TILE_ROWS * kv_heads // heads)) * roots * kv_heads
        spared = roots * (leaves - 1) * tokens * kv_heads * HEAD_DIM * 4
        # The states of roots and of leaves; without sharing there would be none.
        states = 2 * roots * leaves * 4 * heads * (HEAD_DIM + 1)
        is_thin = leaves * heads <= DECODE_ROWS * kv_heads
        return Shared(kind, 0 if is_thin else tiles, tiles if is_thin else 0, states, spared, *times)

    def _time(self, tree: StepTree, shared: NDArray[np.bool_], heads: int, kv_heads: int, cost: GpuCost) -> float:
        """Median microseconds of a call."""
        shape, rows = HeadShape(heads, kv_heads, HEAD_DIM, 2), tree.queries.num_rows
        formats = [decompose(tree, shape, cost.sharing, shared)]
        work = upload(make_gpu_plan(formats, tree.length, rows, shape, self.num_sms, cost).arrays(), self.device)
        start, length, indptr, pages, first_slot = tree.arrays()
        places = np.linspace(0, max(self.pages - len(pages), 0), CALLS, dtype=np.int32)
        trees = [upload([start, length, indptr, place + pages, first_slot], self.device) for place in places]
        positions = torch.from_numpy(tree.positions).to(self.device)
        q = torch.randn(rows, heads, HEAD_DIM, device=self.device, dtype=torch.bfloat16)
        k, v = self.k[:, :, :kv_heads], self.v[:, :, :kv_heads]

        def call(number: int) -> None:
            torch.ops.prefixkit.tree_attention(q, k, v, positions, [*work, *trees[number]], HEAD_DIM**-0.5, "causal")

        return _graph_us(call)


def _forest(copies: int, parent: Sequence[int], length: Sequence[int], queries: int) -> StepTree:
    """Copies of a tree in depth-first order, over pages laid end to end, with ``queries`` rows at each leaf's end."""
    nodes = len(parent)
    start, end = [0] * nodes, list(range(1, nodes + 1))
    for node in range(1, nodes):
        start[node] = start[parent[node]] + length[parent[node]]
    for node in range(nodes - 1, 0, -1):
        end[parent[node]] = max(end[parent[node]], end[node])
    first = np.repeat(np.arange(copies, dtype=np.int32) * nodes, nodes)
    parents, starts, lengths, ends = (
        np.tile(np.array(part, np.int32), copies) for part in (parent, start, length, end)
    )
    parents, ends = np.where(parents < 0, parents, parents + first), ends + first
    indptr = np.concatenate(([0], np.cumsum(-(-lengths // PAGE)))).astype(np.int32)
    pages = np.arange(indptr[-1], dtype=np.int32)
    leaf = np.flatnonzero(ends == np.arange(len(ends)) + 1).astype(np.int32)
    no_sequences = leaf[:0], np.zeros(0, dtype=np.int64)
    placed = starts, lengths, lengths, 0 * lengths, indptr, pages
    snapshot = TreeSnapshot(0, PAGE, parents, ends, *placed, *no_sequences)
    return StepTree(snapshot, Queries(leaf, lengths[leaf] - queries, lengths[leaf]))


def _unsplit(role: Role) -> GpuCost:
    """Costs with which no item is split."""
    whole = replace(role, merge=1000.0)
    return replace(H200, decode=whole) if role == H200.decode else replace(H200, tile=whole)


def _graph_us(call: Callable[[int], None]) -> float:
    """Median time of a call, in a replayed graph of several calls."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return float(np.median(times[1:]))
