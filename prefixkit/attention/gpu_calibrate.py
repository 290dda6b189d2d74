"""A short measured run that finds what attention costs on a GPU: below two seconds, once per machine.

Each path runs items of known number and length, some of them cut in two so that they leave partial states.  A worker's time is

    base + unit time x (units + start x items + (leave + fold) x items that leave a state)

and least squares gives the four numbers.  What sharing costs follows from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from prefixkit.attention.cost import CostModel
from prefixkit.attention.formats import BSR, OPEN
from prefixkit.attention.gpu_cost import H200, WIDE_ROWS, GpuCost, Role
from prefixkit.attention.gpu_plan import make_gpu_plan

log = logging.getLogger("prefixkit")

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
GROUP = HEADS // KV_HEADS
# (rounds, tokens of an item, items that a row is cut into): each worker takes one item per round.
NARROW_POINTS = (
    (1, 1024, 1),
    (2, 1024, 1),
    (4, 256, 1),
    (8, 128, 1),
    (16, 32, 1),
    (4, 128, 2),
    (16, 32, 2),
    (32, 16, 2),
)
WIDE_POINTS = ((1, 4096, 1), (2, 2048, 1), (4, 1024, 1), (8, 256, 1), (4, 512, 2), (8, 128, 2), (12, 64, 2))
REPEATS, CALLS = 5, 4


@dataclass(frozen=True)
class Point:
    """One measurement: what each worker does, in units and items, and the microseconds that it took."""

    units: float
    items: float
    leaving: float
    us: float


@dataclass(frozen=True)
class Fit:
    """``us = base + unit x (units + start x items + state x leaving)``; ``error`` is the root mean square relative error."""

    base: float
    unit: float
    start: float
    state: float
    error: float


def fit(points: Sequence[Point]) -> Fit:
    """Least squares of relative errors; no part costs less than nothing.

    Raises:
        ValueError: the times do not grow with the work.
    """
    columns = np.array([[1.0, p.units, p.items, p.leaving] for p in points])
    us = np.array([p.us for p in points])
    used = list(range(4))
    while True:
        found = np.zeros(4)
        found[used] = np.linalg.lstsq(columns[:, used] / us[:, None], np.ones(len(us)), rcond=None)[0]
        below = [index for index in used if found[index] < 0]
        if not below:
            break
        used.remove(min(below, key=lambda index: found[index] * columns[:, index].mean()))
    base, unit, start, state = found.tolist()
    if not unit > 0:
        raise ValueError(f"the times do not grow with the work: {us.round(1).tolist()} us")
    error = float(np.sqrt(np.mean((columns @ found / us - 1) ** 2)))
    return Fit(base, unit, start / unit, state / unit, error)


def cost_from(narrow: Fit, wide: Fit, num_sms: int, known: GpuCost = H200) -> GpuCost:
    """The costs behind two fits; ``known`` gives the units, and in which proportion a state's cost is writing and folding."""
    sharing = CostModel(
        # A shared node takes a wide item of its own, a share of one multiprocessor's time, ...
        item=max(wide.start, 1.0) * wide.unit / num_sms,
        # ... spares narrow items their reading, ...
        kv_byte=narrow.unit / (known.narrow.workers * num_sms * known.narrow.unit * 4 * HEAD_DIM),
        # ... and leaves states of 128 rows.
        partial_byte=wide.state * wide.unit / (num_sms * WIDE_ROWS * 4 * (HEAD_DIM + 1)),
    )
    return GpuCost(sharing, _role(known.wide, wide), _role(known.narrow, narrow))


def _role(known: Role, found: Fit) -> Role:
    write = known.leave / (known.leave + known.fold)
    return replace(
        known,
        tokens_per_us=known.workers * known.unit / found.unit,
        start=found.start,
        leave=found.state * write,
        fold=found.state * (1 - write),
    )


def calibrate(device: torch.device | str) -> GpuCost:
    """Measure a GPU whose kernels run; takes below two seconds once they are compiled, and 0.6 GB of its memory.

    Raises:
        ValueError: the times make no sense, because something else runs on the GPU, say.
    """
    target = torch.device(device)
    num_sms = torch.cuda.get_device_properties(target).multi_processor_count
    with torch.cuda.device(target):
        memory = _Memory(target, num_sms)
        narrow, wide = (
            fit([memory.measure(role, queries, *point) for point in points])
            for role, queries, points in ((H200.narrow, 1, NARROW_POINTS), (H200.wide, WIDE_ROWS // GROUP, WIDE_POINTS))
        )
    cost = cost_from(narrow, wide, num_sms)
    log.debug("calibrated %s: narrow %s, wide %s, %s", target, narrow, wide, cost)
    return cost


class _Memory:
    """Pages that all measurements read, more than the L2 holds."""

    def __init__(self, device: torch.device, num_sms: int) -> None:
        self.device, self.num_sms = device, num_sms
        most = max(
            -(-rounds * role.workers * num_sms // (KV_HEADS * parts)) * (tokens * parts + PAGE * parts)
            for role, points in ((H200.narrow, NARROW_POINTS), (H200.wide, WIDE_POINTS))
            for rounds, tokens, parts in points
        )
        shape = (most // PAGE, KV_HEADS, PAGE, HEAD_DIM)
        self.k, self.v = (torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")

    def measure(self, role: Role, queries: int, rounds: int, tokens: int, parts: int) -> Point:
        """Time rows of ``queries`` queries, ``tokens`` x ``parts`` long, each cut into ``parts`` items."""
        workers = role.workers * self.num_sms
        rows = max(1, rounds * workers // (KV_HEADS * parts))
        indptr, node = np.arange(rows * parts + 1), np.arange(rows * parts)
        begin = np.repeat(np.arange(rows), parts) * queries
        last = node % parts == parts - 1
        ints = [np.asarray(a, dtype=np.int32) for a in (begin, begin + queries, indptr, node, 0 * node)]
        end = np.where(last, OPEN, tokens).astype(np.int32)
        formats = BSR(WIDE_ROWS, ints[0], ints[1], last, ints[2], ints[3], ints[4], end)
        length = np.full(rows * parts, tokens, dtype=np.int32)
        whole = replace(role, start=0.0, leave=0.0, fold=1000.0)  # nothing is cut but by us
        cost = replace(H200, narrow=whole) if role is H200.narrow else replace(H200, wide=whole)
        plan = make_gpu_plan(
            [formats], length, rows * queries, group=GROUP, kv_heads=KV_HEADS, num_sms=self.num_sms, cost=cost
        )
        place = node % parts
        us = self._time(plan.arrays(), place * tokens, length, np.repeat(parts * tokens - queries, rows), queries)
        items = rows * parts * KV_HEADS / workers
        # What the busiest worker does.
        return Point(np.ceil(items) * -(-tokens // role.unit), np.ceil(items), np.ceil(items) * (parts > 1), us)

    def _time(
        self,
        work: Sequence[NDArray[np.int32]],
        start: NDArray[np.integer],
        length: NDArray[np.int32],
        position: NDArray[np.integer],
        queries: int,
    ) -> float:
        nodes = len(start)
        per_node = -(-length // PAGE)
        page_indptr = np.concatenate(([0], np.cumsum(per_node)))
        arrays = (start, length, page_indptr, np.arange(page_indptr[-1]), np.zeros(nodes))
        tree = [torch.from_numpy(np.asarray(a, dtype=np.int32)).to(self.device) for a in arrays]
        packed = [torch.from_numpy(np.asarray(a, dtype=np.int32)).to(self.device) for a in work]
        rows = (position[:, None] + np.arange(queries)).ravel()
        positions = torch.from_numpy(rows.astype(np.int64)).to(self.device)
        q = torch.randn(len(rows), HEADS, HEAD_DIM, device=self.device, dtype=torch.bfloat16)
        arguments = (q, self.k, self.v, positions, packed, tree, HEAD_DIM**-0.5, "causal")
        return graph_us(lambda: torch.ops.prefixkit.tree_attention(*arguments))


def graph_us(run: Callable[[], object]) -> float:
    """Median time of one call in a replayed graph of some."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return float(np.median(times[1:]))
