"""Random plans, of whole rows and for a GPU with small tiles, and what their items say."""

from dataclasses import replace

import numpy as np

from prefixkit.attention.bsr import decompose
from prefixkit.attention.gpu.gpu_cost import H200, H200_COST, GpuCost
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.plan import KINDS, make_plan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import HeadShape
from tests.attention.trees import random_queries, random_tree

SHAPES = {"one head": (1, 1), "groups of 3": (6, 2), "groups of 8": (8, 1), "groups of 64": (64, 1)}
# Small units, so that small trees are cut much.
SMALL = GpuCost(
    sharing=H200_COST,
    tile=replace(H200.tile, kv_tile=4, start=0.1, write=0.1, merge=0.0),
    decode=replace(H200.decode, kv_tile=2, start=0.1, write=0.1, merge=0.0, least=1),
)


def random_case(seed, heads, kv_heads):
    rng = np.random.default_rng(seed)
    snapshot = random_tree(rng, page_size=4).snapshot()
    queries = random_queries(rng, snapshot)
    shape = HeadShape(heads, kv_heads, 64, 2)
    formats = [decompose(StepTree(snapshot, queries), shape, H200_COST, rng.random(snapshot.num_nodes) < 0.5)]
    return snapshot, queries, formats, StepTree(snapshot, queries).length


def plan_of(case, heads, kv_heads, *, num_sms=7, cost=SMALL):
    """The plan for a GPU of these costs; None for one whose rows are whole."""
    _, queries, formats, length = case
    if cost is None:
        return make_plan(formats, length, queries.num_rows)
    return make_gpu_plan(formats, length, queries.num_rows, HeadShape(heads, kv_heads, 64, 2), num_sms, cost)


def items_of(plan):
    """Items as (is tile, q_begin, q_end, partial_begin, kind, segments)."""
    for tile, items in ((True, plan.tile_items), (False, plan.decode_items)):
        for q_begin, q_end, partial, seg, packed, *first in items.tolist():
            segments = plan.segments[seg : seg + packed // KINDS].tolist()
            assert segments[0] == first
            yield tile, q_begin, q_end, partial, packed % KINDS, segments
