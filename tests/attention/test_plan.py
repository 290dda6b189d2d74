"""Plans: nothing lost, nothing twice, cut at whole units, evenly dealt, and the same every time."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from prefixkit.attention.bsr import BSR, OPEN, decompose
from prefixkit.attention.gpu_cost import H200, H200_COST, GpuCost, Role
from prefixkit.attention.kv_split import CANDIDATES_OF_MANY, CHAIN, LEVELS, busiest
from prefixkit.attention.plan import make_plan
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.testing.random_plans import tree
from prefixkit.tree.radix import PrefixTree
from tests.attention.trees import expected_sight, random_queries, random_tree, row_segments

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


def plan_of(case, heads, kv_heads, **options):
    _, queries, formats, length = case
    options = {"num_sms": 7, "cost": SMALL} | options
    return make_plan(formats, length, queries.num_rows, gqa_group=heads // kv_heads, kv_heads=kv_heads, **options)


def items_of(plan):
    """Items as (is tile, q_begin, q_end, partial_begin, causal, segments)."""
    for tile, items in ((True, plan.tile_items), (False, plan.decode_items)):
        for q_begin, q_end, partial, seg, packed, *first in items.tolist():
            segments = plan.segments[seg : seg + packed // 2].tolist()
            assert segments[0] == first
            yield tile, q_begin, q_end, partial, packed % 2, segments


@pytest.mark.parametrize("seed", range(40))
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


@pytest.mark.parametrize("seed", range(40))
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


@pytest.mark.parametrize("seed", range(40))
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


@pytest.mark.parametrize("seed", range(10))
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


@pytest.mark.parametrize("seed", range(40))
def test_cuts_fall_on_whole_units_of_a_row_and_only_its_end_stays_open(seed):
    case = random_case(seed, 8, 1)
    _, _, formats, length = case
    plan = plan_of(case, 8, 1)
    rows = []  # first and last query of each row, and its tokens from the first
    for bsr in formats:
        for row in range(len(bsr.causal)):
            spans = [(node, begin, min(end, int(length[node]))) for node, begin, end in row_segments(bsr, row)]
            tokens = [(node, offset) for node, begin, end in spans for offset in range(begin, end)]
            rows.append((int(bsr.q_begin[row]), int(bsr.q_end[row]), tokens))
    for tile, q_begin, _, _, _, segments in items_of(plan):
        first = tuple(segments[0][:2])
        # A query meets a token in one row only; an item of a row that grew empty begins nowhere.
        begins = [tokens.index(first) for low, high, tokens in rows if low <= q_begin < high and first in tokens]
        assert len(begins) <= 1
        assert all(begin % (SMALL.tile if tile else SMALL.decode).kv_tile == 0 for begin in begins)
        assert all(end != OPEN for _, _, end in segments[:-1])


def prompt(tokens, heads=32, kv_heads=8, chunk=None):
    """A prompt of which the last ``chunk`` tokens run."""
    snapshot = tree([-1], [tokens])
    begin = tokens - (chunk or tokens)
    snapshot.computed[:] = begin
    queries = Queries(*(np.array([x], dtype=np.int32) for x in (0, begin, tokens)))
    formats = [decompose(StepTree(snapshot, queries), HeadShape(heads, kv_heads, 128, 2), H200_COST)]
    return snapshot, queries, formats, StepTree(snapshot, queries).length


def loads(plan, kv_heads, workers, position, length, start, unit):
    """Units of each worker as the kernels deal the tile items: rounds that change direction."""
    load = np.zeros(workers)
    for place, (q_end, seg, packed) in enumerate(plan.tile_items[:, [1, 3, 4]].tolist()):
        last = position[q_end - 1]
        units = 0
        for node, begin, end in plan.segments[seg : seg + packed // 2].tolist():
            seen = min(end, int(length[node]), last + 1 - int(start[node])) - begin
            assert seen > 0, "an item must not read what lies wholly after its last query"
            units += -(-seen // unit)
        for entry in range(place * kv_heads, (place + 1) * kv_heads):
            turn, at = divmod(entry, workers)
            load[workers - 1 - at if turn % 2 else at] += units
    return load


@pytest.mark.parametrize(("tokens", "chunk"), [(32768, None), (131072, None), (131072, 512), (2048, None), (3000, 100)])
def test_a_prompts_tiles_end_at_their_last_query_and_are_dealt_evenly(tokens, chunk):
    case = prompt(tokens, chunk=chunk)
    snapshot, queries, _, length = case
    plan = plan_of(case, 32, 8, num_sms=132, cost=H200)
    position = queries.row_offset().tolist()
    load = loads(plan, 8, 132, position, length, snapshot.start, H200.tile.kv_tile)
    assert load.max() <= 1.1 * load.mean() + 2


def test_a_long_prompt_is_not_cut_where_its_tiles_fill_the_gpu():
    plan = plan_of(prompt(32768), 32, 8, num_sms=132, cost=H200)
    assert plan.counts[3] == 0
    assert len(plan.tile_items) == 32768 * 4 // 128


def test_a_lone_long_sequence_is_spread_over_the_gpu():
    plan = plan_of(prompt(131072, chunk=1), 32, 8, num_sms=132, cost=H200)
    assert len(plan.decode_items) * 8 >= 3 * 132
    assert plan.segments[-1].tolist()[2] == OPEN or OPEN in plan.segments[:, 2]


def test_where_one_head_reads_alone_every_worker_gets_a_part():
    plan = plan_of(prompt(2**20, chunk=1), 8, 1, num_sms=132, cost=H200)
    assert 500 <= len(plan.decode_items) <= 528
    assert plan.counts[3] == len(plan.decode_items)


def test_tiles_of_a_shared_node_that_read_the_same_piece_follow_each_other():
    """So that the multiprocessors work on the same keys at the same time, and the cache holds them."""
    snapshot = tree([-1] + [0] * 256, [16384] + [16] * 256)
    leaf = np.arange(1, 257, dtype=np.int32)
    queries = Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf])
    formats = [decompose(StepTree(snapshot, queries), HeadShape(8, 1, 128, 2), H200_COST)]
    plan = make_plan(formats, StepTree(snapshot, queries).length, 256, gqa_group=8, kv_heads=1, cost=H200)
    begins = plan.tile_items[:, 6].tolist()
    runs = 1 + sum(a != b for a, b in pairwise(begins))
    pieces = len(set(begins))
    assert pieces > 4
    assert runs == pieces


def _part(rows, chosen):
    """A format of some of the rows."""
    segment = np.repeat(chosen, np.diff(rows.indptr))
    indptr = np.concatenate(([0], np.cumsum(np.diff(rows.indptr)[chosen])))
    columns = {name: getattr(rows, name)[chosen] for name in ("q_begin", "q_end", "causal")}
    return BSR(**columns, indptr=indptr, **{name: getattr(rows, name)[segment] for name in ("node", "begin", "end")})


def test_any_order_of_formats_gives_the_same_items():
    rng = np.random.default_rng(0)
    for seed in range(30):
        snapshot = random_tree(rng, page_size=4).snapshot()
        queries = random_queries(rng, snapshot)
        shape, length = HeadShape(6, 2, 64, 2), StepTree(snapshot, queries).length
        rows = decompose(StepTree(snapshot, queries), shape, H200_COST)
        plans = [
            make_plan(formats, length, queries.num_rows, gqa_group=3, kv_heads=2, num_sms=5, cost=SMALL)
            for formats in (
                [rows],
                [_part(rows, ~rows.causal), _part(rows, rows.causal)],
            )
        ]
        one, two = ([item[1:] for item in items_of(plan)] for plan in plans)
        assert one == two, seed
        assert np.array_equal(plans[0].merge_indices, plans[1].merge_indices)


def test_the_estimate_is_the_sum_over_rounds_of_their_first_entries():
    """`busiest` adds up levels; by hand it is a sort, up to the levels' width."""
    rng = np.random.default_rng(0)
    role = Role(16, 4, 59.0, start=1.0, write=0.5, merge=0.25, least=4)
    for _ in range(20):
        units = np.unique(rng.integers(1, 500, 30))
        count = rng.integers(1, 60, len(units))
        chunk = np.maximum(4, -(-units[-1] // CANDIDATES_OF_MANY))
        heads, workers = int(rng.integers(1, 9)), int(rng.integers(1, 600))
        got = busiest(role, units, count, chunk, heads, workers) / (64 * workers)
        for cut, mine in enumerate(-(-units // chunk[:, None])):
            each = -(-units // mine) + role.start + role.write * (mine > 1)
            entries = np.sort(np.repeat(each, mine * count * heads))[::-1]
            left = (mine * count * heads)[mine > 1].sum()
            exact = entries[::workers].sum() + role.merge * left / workers + CHAIN / 64 * mine.max()
            width = 2 * (entries[0] + role.write) / LEVELS
            assert exact - 0.1 <= got[cut] <= exact + len(entries[::workers]) * width + 0.1


def test_costs_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="kv_tile must be above 0"):
        replace(H200.tile, kv_tile=0)
    with pytest.raises(ValueError, match="merge must be a number of KV tiles"):
        replace(H200.tile, merge=-1.0)


@pytest.mark.parametrize(
    ("lengths", "leaves", "kv_heads", "by_head"),
    [
        ([4096], 2048, 8, 1),  # many items, all alike
        ([4096], 512, 1, 0),  # one KV head
        ([64], 16, 8, 0),  # all at once
        ([20_000] + [500] * 16, 2048, 2, 0),  # long and short: the order matters more
    ],
)
def test_many_tile_items_or_equal_ones_go_head_by_head(lengths, leaves, kv_heads, by_head):
    """Roots of these lengths share the leaves evenly."""
    parents, sizes = [], []
    for length in lengths:
        parents.append(-1)
        sizes.append(length)
        root = len(parents) - 1
        each = leaves // len(lengths)
        parents += [root] * each
        sizes += [16] * each
    snapshot = tree(parents, sizes)
    last = np.flatnonzero(np.array(parents) >= 0)
    queries = Queries(last, np.full(len(last), 15), np.full(len(last), 16))
    shape = HeadShape(4 * kv_heads, kv_heads, 128, 2)
    formats = [decompose(StepTree(snapshot, queries), shape, H200_COST)]
    plan = make_plan(formats, StepTree(snapshot, queries).length, len(last), gqa_group=4, kv_heads=kv_heads, cost=H200)
    assert plan.counts[4] == by_head


@pytest.mark.parametrize(("prefix", "own", "streams"), [(4096, 16, 0), (64, 512, 1), (0, 64, 1)])
def test_a_plan_says_whether_its_decode_items_take_longer(prefix, own, streams):
    leaves = 256
    snapshot = tree([-1] + [0] * leaves, [prefix] + [own] * leaves)
    queries = Queries(np.arange(1, leaves + 1), np.full(leaves, own - 1), np.full(leaves, own))
    formats = [decompose(StepTree(snapshot, queries), HeadShape(32, 8, 128, 2), H200_COST)]
    assert make_plan(formats, snapshot.length, leaves, gqa_group=4, kv_heads=8, cost=H200).counts[5] == streams
