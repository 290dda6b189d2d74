"""Plans: nothing lost, nothing twice, and the same every time."""

from collections import Counter

import numpy as np
import pytest

from prefixkit.attention.bsr import Queries, decompose, visible_lengths
from prefixkit.attention.plan import make_plan
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.tree.radix import PrefixTree
from tests.attention.trees import expected_sight, random_queries, random_tree

SHAPE = HeadShape(heads=6, kv_heads=2, head_dim=8, itemsize=4)


def random_case(seed):
    print("seed", seed)
    rng = np.random.default_rng(seed)
    snapshot = random_tree(rng, page_size=4).snapshot()
    queries = random_queries(rng, snapshot)
    rows = decompose(snapshot, queries, SHAPE, CPU_COST, rng.random(snapshot.num_nodes) < 0.5)
    return snapshot, queries, rows, visible_lengths(snapshot, queries)


@pytest.mark.parametrize("seed", range(40))
def test_items_cover_every_visible_token_of_every_query_exactly_once(seed):
    snapshot, queries, rows, length = random_case(seed)
    plan = make_plan(rows, queries.num_rows)
    position = snapshot.start[queries.row_node()] + queries.row_offset()
    counts = [Counter() for _ in range(queries.num_rows)]
    for item, (q_begin, q_end, causal, _) in enumerate(plan.items.tolist()):
        for node, begin, end in plan.segments[plan.segment_indptr[item] : plan.segment_indptr[item + 1]].tolist():
            for offset in range(begin, min(end, length[node])):
                for query in range(q_begin, q_end):
                    if not causal or snapshot.start[node] + offset <= position[query]:
                        counts[query][node, offset] += 1
    for got, expected in zip(counts, expected_sight(snapshot, queries), strict=True):
        assert set(got) == expected
        assert set(got.values()) == {1}


@pytest.mark.parametrize("seed", range(40))
def test_every_partial_row_is_written_once_and_merged_once(seed):
    _, queries, rows, _ = random_case(seed)
    plan = make_plan(rows, queries.num_rows)
    written = Counter()
    direct = Counter()
    for q_begin, q_end, _, partial in plan.items.tolist():
        for query in range(q_begin, q_end):
            if partial < 0:
                direct[query] += 1
            else:
                written[partial + query - q_begin, query] += 1
    merged = Counter(
        (int(partial), query)
        for query in range(queries.num_rows)
        for partial in plan.merge_indices[plan.merge_indptr[query] : plan.merge_indptr[query + 1]]
    )
    assert written == merged
    assert sorted(partial for partial, _ in written) == list(range(len(plan.merge_indices)))
    for query in range(queries.num_rows):
        merges = plan.merge_indptr[query + 1] - plan.merge_indptr[query]
        assert (merges == 0) == (direct[query] == 1), "either one item writes the output, or partials are merged"


def test_the_same_input_gives_the_same_plan():
    _, queries, rows, _ = random_case(5)
    one, two = (make_plan(rows, queries.num_rows) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one.arrays(), two.arrays(), strict=True))


def test_partials_merge_from_the_root_down():
    tree = PrefixTree(256)
    prompt = tree.insert(np.arange(64))
    children = tree.fork(prompt, 2)
    for child in children:
        tree.extend(child, np.arange(64))
    tree.mark_ready([prompt.node], [64])
    snapshot = tree.snapshot()
    queries = Queries(*(np.array(c, dtype=np.int32) for c in ([1, 2], [0, 0], [64, 64])))
    plan = make_plan(decompose(snapshot, queries, SHAPE, CPU_COST, np.array([True, False, False])), 128)
    owner = {}
    for item, (q_begin, q_end, _, partial) in enumerate(plan.items.tolist()):
        first = plan.segments[plan.segment_indptr[item]]
        for row in range(q_end - q_begin):
            owner[partial + row] = (int(first[0]), int(first[1]))
    for query in range(128):
        order = [owner[int(p)] for p in plan.merge_indices[plan.merge_indptr[query] : plan.merge_indptr[query + 1]]]
        assert order == sorted(order)
        assert len(order) > 1


def test_kv_tokens_read_counts_a_shared_node_once():
    tree = PrefixTree(256)
    prompt = tree.insert(np.arange(1000))
    for fork in tree.fork(prompt, 32):
        tree.extend(fork, [1, 2])
    tree.mark_ready([prompt.node], [1000])
    snapshot = tree.snapshot()
    leaves = np.arange(1, 33, dtype=np.int32)
    queries = Queries(leaves, np.zeros(32, dtype=np.int32), np.full(32, 2, dtype=np.int32))
    length = visible_lengths(snapshot, queries)
    plan = make_plan(decompose(snapshot, queries, SHAPE, CPU_COST), 64)
    assert plan.kv_tokens_read(length) == 1000 + 32 * 2
