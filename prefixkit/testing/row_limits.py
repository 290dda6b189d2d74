"""Plans whose shared rows are of kind LIMIT, with random limits, and the equivalent mask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.bsr import MaskKind
from prefixkit.attention.plan import Plan
from prefixkit.attention.variants import Variant, variant
from prefixkit.testing.forests import Case


def with_row_limits(
    rng: np.random.Generator, case: Case, plan: Plan, device: torch.device | str = "cpu"
) -> tuple[Case, Plan, Variant]:
    """The plan with a limit for each query, the last position that it sees of its ancestors.

    Args:
        rng: Draws the limits: before all positions, after all, or anywhere.
        case: Queries over a forest.
        plan: A plan for the kernels of prefixkit, in which every node above queries is shared.
        device: Device of the tensors that the mask captures.

    Returns:
        The case with a number for each run of queries, the plan, and a mask that reads these numbers, for an oracle.
    """
    queries, positions = case.queries, case.positions.numpy()
    rows, longest = queries.num_rows, int(positions.max()) + 2
    limits = np.sort(np.where(rng.random(rows) < 0.1, longest, rng.integers(-1, longest, rows))).astype(np.int32)
    of_partials = np.full(max(int(plan.counts[3]), 1), -12345, dtype=np.int32)
    lists = [plan.tile_items.copy(), plan.decode_items.copy()]
    for items in lists:
        for item in items[items[:, 4] & 3 == MaskKind.ALL]:
            begin, end, partial = item[:3].tolist()
            assert partial >= 0, "items of shared nodes write partial states"
            of_partials[partial : partial + end - begin] = limits[begin:end]
        items[items[:, 4] & 3 == MaskKind.ALL, 4] += MaskKind.LIMIT
    run = np.repeat(np.arange(len(queries.node)), queries.end - queries.begin)
    start = case.snapshot.start[queries.node]
    table = np.full((len(queries.node), longest), -1)
    table[run, positions] = limits
    limit_of, start_of = (torch.from_numpy(each.astype(np.int64)).to(device) for each in (table, start))

    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ((kv_idx <= limit_of[b, q_idx]) | (kv_idx >= start_of[b])) & (kv_idx <= q_idx)

    numbered = replace(queries, sequence=np.arange(len(queries.node), dtype=np.int32))
    limited = replace(plan, tile_items=lists[0], decode_items=lists[1], limits=of_partials)
    return (
        replace(case, queries=numbered),
        limited,
        variant(mask_mod=within),
    )
