"""Plans for a GPU: split at whole KV tiles, evenly dealt, and in an order that suits its caches."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from prefixkit.attention.bsr import OPEN, decompose
from prefixkit.attention.gpu.gpu_cost import H200, H200_COST, Role
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan, tile_heads
from prefixkit.attention.gpu.kv_split import CANDIDATES_OF_MANY, CHAIN, LEVELS, busiest
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.testing.random_plans import tree
from tests.attention.plans import SMALL, items_of, plan_of, random_case
from tests.attention.trees import row_segments
from tests.seeds import seeds


@seeds(40)
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
        for node, begin, end in plan.segments[seg : seg + packed // 4].tolist():
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
    plan = make_gpu_plan(formats, StepTree(snapshot, queries).length, 256, HeadShape(8, 1, 128, 2), 132, H200)
    begins = plan.tile_items[:, 6].tolist()
    runs = 1 + sum(a != b for a, b in pairwise(begins))
    pieces = len(set(begins))
    assert pieces > 4
    assert runs == pieces


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
    plan = make_gpu_plan(formats, StepTree(snapshot, queries).length, len(last), shape, 132, H200)
    assert plan.counts[4] == by_head


@pytest.mark.parametrize(("prefix", "own", "streams"), [(4096, 16, 0), (64, 512, 1), (0, 64, 1)])
def test_a_plan_says_whether_its_decode_items_take_longer(prefix, own, streams):
    leaves = 256
    snapshot = tree([-1] + [0] * leaves, [prefix] + [own] * leaves)
    queries = Queries(np.arange(1, leaves + 1), np.full(leaves, own - 1), np.full(leaves, own))
    shape = HeadShape(32, 8, 128, 2)
    formats = [decompose(StepTree(snapshot, queries), shape, H200_COST)]
    assert make_gpu_plan(formats, snapshot.length, leaves, shape, 132, H200).counts[5] == streams


@pytest.mark.parametrize(("prefix", "rows"), [(1024, 64), (16384, 128)])
def test_few_tiles_are_low(prefix, rows):
    leaves, shape, cost = 64, HeadShape(8, 1, 128, 2), replace(H200, low_tile_heads=64)
    snapshot = tree([-1] + [0] * leaves, [prefix] + [16] * leaves)
    queries = Queries(np.arange(1, leaves + 1), np.full(leaves, 15), np.full(leaves, 16))
    formats = [decompose(StepTree(snapshot, queries), shape, H200_COST)]
    plan = make_gpu_plan(formats, snapshot.length, leaves, shape, 132, cost)
    begin, end = plan.tile_items[:, :2].T
    assert (8 * (end - begin)).tolist() == [rows] * len(begin) and len(begin) <= 132
    assert tile_heads(formats, snapshot.length, shape, 132, cost) == rows
