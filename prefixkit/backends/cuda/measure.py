"""Timing attention on synthetic trees, for calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.bsr import BSR, OPEN
from prefixkit.attention.gpu_cost import DECODE_ROWS, H200, TILE_ROWS, GpuCost, Role
from prefixkit.attention.plan import make_plan
from prefixkit.ops import library as ops  # noqa: F401  (declares torch.ops.prefixkit)

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
GROUP = HEADS // KV_HEADS
REPEATS, CALLS = 5, 4
Longs = NDArray[np.int64]


@dataclass(frozen=True)
class Point:
    """One measurement of a path: what each worker does, in units and items, and the microseconds that it took."""

    units: float
    items: float
    leaving: float
    us: float


@dataclass(frozen=True)
class Shared:
    """One forest measured with its roots shared and with nothing shared, and what sharing is known to cost and spare.

    Attributes:
        kind: Forests of a kind have as many heads.
        tile, decode: Tiles of all shared roots, for each KV head.
        partial_bytes: Of the partial states that they leave.
        spared_bytes: Bytes of KV that are not read again.
    """

    kind: int
    tile: float
    decode: float
    partial_bytes: float
    spared_bytes: float
    shared_us: float
    folded_us: float


@dataclass(frozen=True)
class _Rows:
    """Rows over nodes of their own, laid end to end in the pool: ``(q_begin, queries, causal, nodes)`` and the tree."""

    formats: BSR
    start: Longs
    length: Longs
    positions: Longs


class Memory:
    """Pages that all measurements read; more than the L2 holds, and each call of a measurement reads its own."""

    def __init__(self, device: torch.device, num_sms: int, tokens_per_worker: int = 256) -> None:
        self.device, self.num_sms = device, num_sms
        tokens = tokens_per_worker * H200.decode.workers * num_sms
        self.pages = tokens // PAGE
        shape = (self.pages, KV_HEADS, PAGE, HEAD_DIM)
        self.k, self.v = (torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")

    def measure(self, role: Role, queries: int, rounds: int, tokens: int, parts: int) -> Point:
        """Time rows of ``queries`` queries over ``parts`` nodes of ``tokens`` tokens, an item for each node."""
        workers = role.workers * self.num_sms
        count = max(1, rounds * workers // (KV_HEADS * parts))
        node = np.arange(count * parts)
        place, row = node % parts, node // parts
        indptr, length = np.arange(len(node) + 1), np.full(len(node), tokens)
        rows = _rows(row * queries, (row + 1) * queries, place == parts - 1, indptr, node, length)
        position = np.repeat(parts * tokens - queries, count)[:, None] + np.arange(queries)
        us = self._time(_Rows(rows, place * tokens, length, position.ravel()), HEADS, KV_HEADS, _uncut(role))
        items = np.ceil(len(node) * KV_HEADS / workers)  # what the busiest worker does
        return Point(items * -(-tokens // role.kv_tile), items, items * (parts > 1), us)

    def compare(self, kind: int, heads: int, kv_heads: int, roots: int, leaves: int, tokens: int, leaf: int) -> Shared:
        """Time a forest of ``roots`` with ``leaves`` each, one query at each leaf's end, shared and folded."""
        count = roots * leaves
        root = np.arange(roots) * (leaves + 1)
        mine = (root[:, None] + 1 + np.arange(leaves)).ravel()  # leaves, in depth-first order
        is_root = np.isin(np.arange(roots * (leaves + 1)), root)
        start, length = np.where(is_root, 0, tokens), np.where(is_root, tokens, leaf)
        positions = np.full(count, tokens + leaf - 1)
        query = np.arange(count)
        folded = _rows(
            query,
            query + 1,
            np.ones(count, bool),
            2 * np.arange(count + 1),
            np.stack((mine - 1 - query % leaves, mine), 1).ravel(),
            length,
        )
        dense = np.arange(roots) * leaves
        shared = _rows(
            np.concatenate((dense, query)),
            np.concatenate((dense + leaves, query + 1)),
            np.repeat((False, True), (roots, count)),
            np.arange(roots + count + 1),
            np.concatenate((root, mine)),
            length,
        )
        times = [self._time(_Rows(rows, start, length, positions), heads, kv_heads, H200) for rows in (shared, folded)]
        tiles = -(-leaves // (TILE_ROWS * kv_heads // heads)) * roots * kv_heads
        spared = roots * (leaves - 1) * tokens * kv_heads * HEAD_DIM * 4
        # The roots' states, and those of the leaves, which would have none if nothing were shared.
        states = 2 * count * 4 * heads * (HEAD_DIM + 1)
        is_thin = leaves * heads <= DECODE_ROWS * kv_heads
        return Shared(kind, 0 if is_thin else tiles, tiles if is_thin else 0, states, spared, *times)

    def _time(self, rows: _Rows, heads: int, kv_heads: int, cost: GpuCost) -> float:
        """Median microseconds of a call."""
        count = len(rows.positions)
        plan = make_plan(
            [rows.formats],
            rows.length.astype(np.int32),
            count,
            group=heads // kv_heads,
            kv_heads=kv_heads,
            num_sms=self.num_sms,
            cost=cost,
        )
        work = [self._int(array) for array in plan.arrays()]
        indptr = np.concatenate(([0], np.cumsum(-(-rows.length // PAGE))))
        used = int(indptr[-1])
        places = np.linspace(0, max(self.pages - used, 0), CALLS, dtype=np.int64)
        trees = [
            [self._int(a) for a in (rows.start, rows.length, indptr, place + np.arange(used), 0 * rows.start)]
            for place in places
        ]
        positions = torch.from_numpy(rows.positions.astype(np.int64)).to(self.device)
        q = torch.randn(count, heads, HEAD_DIM, device=self.device, dtype=torch.bfloat16)
        k, v = self.k[:, :, :kv_heads], self.v[:, :, :kv_heads]

        def call(number: int) -> None:
            torch.ops.prefixkit.tree_attention(q, k, v, positions, [*work, *trees[number]], HEAD_DIM**-0.5, "causal")

        return _graph_us(call)

    def _int(self, array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.array(array, dtype=np.int32)).to(self.device)


def _rows(begin: Longs, end: Longs, causal: NDArray[np.bool_], indptr: Longs, node: Longs, length: Longs) -> BSR:
    """Rows over whole nodes; causal ones end OPEN."""
    ends = length[node]
    ends[indptr[1:][causal] - 1] = OPEN
    columns = [np.asarray(column, dtype=np.int32) for column in (begin, end, indptr, node, 0 * node, ends)]
    return BSR(columns[0], columns[1], causal, *columns[2:])


def _uncut(role: Role) -> GpuCost:
    """Costs by which no item is split."""
    whole = replace(role, merge=1000.0)
    return replace(H200, decode=whole) if role == H200.decode else replace(H200, tile=whole)


def _graph_us(call: Callable[[int], None]) -> float:
    """Median time of a call in a replayed graph of some."""
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
