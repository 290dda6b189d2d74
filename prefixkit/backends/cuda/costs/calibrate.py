"""A short run that measures the costs of attention on a GPU: below two seconds, once per machine.

Each path runs items of known number and length, some of them split in two so that they write partial states.  The time
of a worker is

    base + time of a KV tile x (tiles + start x items + (write + merge) x items that write a state)

and least squares give the four numbers.  The costs of sharing follow from them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from prefixkit.attention.gpu.gpu_cost import H200, GpuCost, Role
from prefixkit.attention.sharing import TILE_ROWS, CostModel
from prefixkit.backends.cuda.costs.measure import GROUP, HEAD_DIM, Memory, Point, Shared

Doubles = NDArray[np.float64]

log = logging.getLogger("prefixkit")

# (rounds, tokens of an item, splits of a row): each worker takes one item per round.
DECODE_POINTS = (
    (1, 1024, 1),
    (2, 1024, 1),
    (4, 256, 1),
    (8, 128, 1),
    (16, 32, 1),
    (4, 128, 2),
    (16, 32, 2),
    (32, 16, 2),
)
TILE_POINTS = ((1, 4096, 1), (2, 2048, 1), (4, 1024, 1), (8, 256, 1), (4, 512, 2), (8, 128, 2), (12, 64, 2))
# Forests, measured with and without sharing their roots: (roots, leaves per root, tokens of a root).
FORESTS = (
    (64, 4, 32),
    (64, 4, 96),
    (32, 8, 32),
    (32, 8, 128),
    (16, 16, 32),
    (16, 16, 128),
    (64, 16, 32),
    (8, 32, 64),
    (32, 32, 32),
)
LEAF = 32
THIN = ((128, 2, 64), (128, 2, 128))  # their roots make decode items if four query heads share a KV head
SHAPES = (((8, 1), FORESTS), ((32, 8), FORESTS + THIN))


@dataclass(frozen=True)
class Fit:
    """``us = base + tile x (tiles + start x items + state x states)``; ``error`` is relative, root mean square."""

    base: float
    tile: float
    start: float
    state: float
    error: float


def fit(points: Sequence[Point]) -> Fit:
    """Least squares of relative errors, with no negative costs."""
    columns = np.array([[1.0, p.tiles, p.items, p.states] for p in points])
    us = np.array([p.us for p in points])
    found = _least_squares(columns, us, 1 / us)
    base, tile, start, state = found.tolist()
    if not tile > 0:
        raise ValueError(f"the times do not grow with the work: {us.round(1).tolist()} us")
    error = float(np.sqrt(np.mean((columns @ found / us - 1) ** 2)))
    return Fit(base, tile, start / tile, state / tile, error)


def _least_squares(columns: Doubles, values: Doubles, weight: Doubles) -> Doubles:
    """Weighted least squares with no negative coefficient: the most negative one is left out until none is negative."""
    used = list(range(columns.shape[1]))
    while True:
        found = np.zeros(columns.shape[1])
        found[used] = np.linalg.lstsq(columns[:, used] * weight[:, None], values * weight, rcond=None)[0]
        below = [index for index in used if found[index] < 0]
        if not below:
            return found
        used.remove(min(below, key=lambda index: found[index] * columns[:, index].mean()))


def fit_sharing(forests: Sequence[Shared], kv_byte: float) -> CostModel:
    """Fit by least squares what sharing cost beyond the KV that it spared; each kind has its own cost of merging."""
    kinds = np.eye(max(f.kind for f in forests) + 1)
    columns = np.array([[*kinds[f.kind], f.tile, f.decode, f.partial_bytes] for f in forests])
    us = np.array([f.shared_us - f.unshared_us + f.spared_bytes * kv_byte for f in forests])
    weight = 1 / np.array([f.shared_us for f in forests])
    tile, decode, partial_byte = _least_squares(columns, us, weight)[-3:].tolist()
    found = {"kv_byte": kv_byte, "partial_byte": partial_byte, "tile_item": tile, "decode_item": decode}
    return replace(H200.sharing, item=0.0, **found)


def cost_from(decode: Fit, tile: Fit, forests: Sequence[Shared], num_sms: int) -> GpuCost:
    """The costs from all measurements; an H200's give KV tiles, and the share of a state's cost that is its write."""
    kv_byte = decode.tile / (H200.decode.workers * num_sms * H200.decode.kv_tile * 4 * HEAD_DIM)
    return GpuCost(fit_sharing(forests, kv_byte), _role(H200.tile, tile), _role(H200.decode, decode))


def _role(known: Role, found: Fit) -> Role:
    share = known.write / (known.write + known.merge)
    return replace(
        known,
        tokens_per_us=known.workers * known.kv_tile / found.tile,
        start=found.start,
        write=found.state * share,
        merge=found.state * (1 - share),
    )


def calibrate(device: torch.device | str) -> GpuCost:
    """Measure a GPU that our kernels run on: below two seconds once they are compiled, and 0.6 GB of its memory.

    Raises:
        ValueError: the times make no sense, because something else runs on the GPU, say.
    """
    target = torch.device(device)
    num_sms = torch.cuda.get_device_properties(target).multi_processor_count
    with torch.cuda.device(target):
        memory = Memory(target, num_sms)
        decode, tile = (
            fit([memory.measure(role, queries, *point) for point in points])
            for role, queries, points in ((H200.decode, 1, DECODE_POINTS), (H200.tile, TILE_ROWS // GROUP, TILE_POINTS))
        )
        forests = [
            memory.compare(kind, *heads, *forest, LEAF)
            for kind, (heads, those) in enumerate(SHAPES)
            for forest in those
        ]
    cost = cost_from(decode, tile, forests, num_sms)
    log.debug("calibrated %s: decode %s, tile %s, %s", target, decode, tile, cost)
    return cost
