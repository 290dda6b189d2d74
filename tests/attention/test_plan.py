"""Plans: nothing lost, nothing twice, and the same every time, whether rows are whole or split for a GPU."""

from collections import Counter

import numpy as np
import pytest

from prefixkit.attention.bsr import BSR, decompose
from prefixkit.attention.gpu.gpu_cost import H200, H200_COST
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.plan import make_plan
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.tree.radix import PrefixTree
from tests.attention.plans import SHAPES, SMALL, items_of, plan_of, random_case
from tests.attention.trees import expected_sight, random_queries, random_tree, row_segments
from tests.seeds import seeds


@seeds(20)
@pytest.mark.parametrize("shape", SHAPES)
def test_items_cover_every_visible_token_of_every_query_exactly_once(seed, shape):
    case = random_case(seed, *SHAPES[shape])
    snapshot, queries, _, length = case
    position = snapshot.start[queries.row_node()] + queries.row_offset()
    for options in ({}, {"cost": H200}, {"num_sms": 132}, {"cost": None}):
        plan = plan_of(case, *SHAPES[shape], **options)
        counts = [Counter() for _ in range(queries.num_rows)]
        for _, q_begin, q_end, _, causal, segments in items_of(plan):
            for node, begin, end in segments:
                for offset in range(begin, min(end, length[node])):
                    for query in range(q_begin, q_end):
                        if not causal or snapshot.start[node] + offset <= position[query]:
                            counts[query][node, offset] += 1
        for got, expected in zip(counts, expected_sight(snapshot, queries), strict=True):
            assert set(got) == expected
            assert set(got.values()) == {1}


@seeds(20)
@pytest.mark.parametrize("cost", [SMALL, None], ids=["cut", "whole"])
def test_a_plan_still_covers_all_once_after_its_leaves_have_grown(seed, cost):
    """Lengths are read when a plan runs: the same plan serves leaves that grew, and their later queries."""
    case = random_case(seed, 8, 1)
    snapshot, queries, _, length = case
    plan = plan_of(case, 8, 1, cost=cost)
    is_leaf = snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1
    node = queries.row_node()
    ends_there = (queries.end == length[queries.node])[
        np.searchsorted(queries.node, node)
    ]  # else not the latest tokens
    for grown in (1, 3, 17):
        later = length + grown * is_leaf
        offset = queries.row_offset() + grown * (is_leaf[node] & ends_there)
        seen = [Counter() for _ in node]
        for _, q_begin, q_end, _, causal, segments in items_of(plan):
            last = snapshot.start[node[q_end - 1]] + offset[q_end - 1]
            for of, begin, end in segments:
                until = min(end, later[of], last + 1 - snapshot.start[of]) if causal else min(end, later[of])
                for query in range(q_begin, q_end):
                    mine = min(until, snapshot.start[node[query]] + offset[query] + 1 - snapshot.start[of])
                    seen[query].update((of, token) for token in range(begin, mine if causal else until))
        for query, counts in enumerate(seen):
            above, expected = int(snapshot.parent[node[query]]), int(offset[query]) + 1
            while above >= 0:
                expected += int(snapshot.length[above])
                above = int(snapshot.parent[above])
            assert len(counts) == expected
            assert set(counts.values()) == {1}


@seeds(20)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cost", [SMALL, None], ids=["cut", "whole"])
def test_partial_rows_are_written_once_and_merged_once_root_first(seed, shape, cost):
    case = random_case(seed, *SHAPES[shape])
    plan = plan_of(case, *SHAPES[shape], cost=cost)
    written, direct, place = Counter(), Counter(), {}
    for _, q_begin, q_end, partial, _, segments in items_of(plan):
        for query in range(q_begin, q_end):
            if partial < 0:
                direct[query] += 1
            else:
                written[partial + query - q_begin, query] += 1
                place[partial + query - q_begin] = segments[0][:2]
    merged = Counter()
    for query in range(plan.counts[2]):
        parts = plan.merge_indices[plan.merge_indptr[query] : plan.merge_indptr[query + 1]].tolist()
        merged.update((part, query) for part in parts)
        assert [place[part] for part in parts] == sorted(place[part] for part in parts), "root first"
        assert (len(parts) == 0) == (direct[query] == 1), "either one item writes the output, or partials are merged"
    assert written == merged
    assert sorted(part for part, _ in written) == list(range(plan.counts[3]))


@seeds(10)
def test_without_a_gpu_each_row_is_one_item_and_keeps_its_order(seed):
    case = random_case(seed, 6, 2)
    _, _, (rows,), _ = case
    plan = plan_of(case, 6, 2, cost=None)
    assert len(plan.decode_items) == 0
    expected = [
        (True, rows.q_begin[row], rows.q_end[row], rows.causal[row], row_segments(rows, row))
        for row in range(len(rows.causal))
    ]
    found = [(*item[:3], item[4], [tuple(segment) for segment in item[5]]) for item in items_of(plan)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("cost", [SMALL, None], ids=["cut", "whole"])
def test_the_same_input_gives_the_same_plan(cost):
    case = random_case(5, 6, 2)
    one, two = (plan_of(case, 6, 2, cost=cost) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one.arrays(), two.arrays(), strict=True))


def test_partials_merge_from_the_root_down():
    grown = PrefixTree(256)
    prompt = grown.insert(np.arange(64))
    children = grown.fork(prompt, 2)
    for child in children:
        grown.extend(child, np.arange(64))
    grown.mark_computed([prompt.node], [64])
    snapshot = grown.snapshot()
    queries = Queries(*(np.array(c, dtype=np.int32) for c in ([1, 2], [0, 0], [64, 64])))
    shape = HeadShape(heads=6, kv_heads=2, head_dim=8, itemsize=4)
    rows = decompose(StepTree(snapshot, queries), shape, CPU_COST, np.array([True, False, False]))
    plan = make_plan([rows], StepTree(snapshot, queries).length, 128)
    owner = {}
    for _, q_begin, q_end, partial, _, segments in items_of(plan):
        for row in range(q_end - q_begin):
            owner[partial + row] = tuple(segments[0][:2])
    for query in range(128):
        order = [owner[int(p)] for p in plan.merge_indices[plan.merge_indptr[query] : plan.merge_indptr[query + 1]]]
        assert order == sorted(order)
        assert len(order) > 1


def test_kv_tokens_read_counts_a_shared_node_once():
    grown = PrefixTree(256)
    prompt = grown.insert(np.arange(1000))
    for fork in grown.fork(prompt, 32):
        grown.extend(fork, [1, 2])
    grown.mark_computed([prompt.node], [1000])
    snapshot = grown.snapshot()
    leaves = np.arange(1, 33, dtype=np.int32)
    queries = Queries(leaves, np.zeros(32, dtype=np.int32), np.full(32, 2, dtype=np.int32))
    length = StepTree(snapshot, queries).length
    shape = HeadShape(heads=6, kv_heads=2, head_dim=8, itemsize=4)
    plan = make_plan([decompose(StepTree(snapshot, queries), shape, CPU_COST)], length, 64)
    assert plan.kv_tokens_read(length) == 1000 + 32 * 2


def _part(rows, chosen):
    """A format of some of the rows."""
    segment = np.repeat(chosen, np.diff(rows.indptr))
    indptr = np.concatenate(([0], np.cumsum(np.diff(rows.indptr)[chosen])))
    columns = {name: getattr(rows, name)[chosen] for name in ("q_begin", "q_end", "kind", "first", "last")}
    return BSR(**columns, indptr=indptr, **{name: getattr(rows, name)[segment] for name in ("node", "begin", "end")})


def test_any_order_of_formats_gives_the_same_items():
    rng = np.random.default_rng(0)
    for seed in range(30):
        snapshot = random_tree(rng, page_size=4).snapshot()
        queries = random_queries(rng, snapshot)
        shape, length = HeadShape(6, 2, 64, 2), StepTree(snapshot, queries).length
        rows = decompose(StepTree(snapshot, queries), shape, H200_COST)
        plans = [
            make_gpu_plan(formats, length, queries.num_rows, shape, 5, SMALL)
            for formats in (
                [rows],
                [_part(rows, ~rows.causal), _part(rows, rows.causal)],
            )
        ]
        one, two = ([item[1:] for item in items_of(plan)] for plan in plans)
        assert one == two, seed
        assert np.array_equal(plans[0].merge_indices, plans[1].merge_indices)
