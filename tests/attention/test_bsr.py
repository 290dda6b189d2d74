"""Formats: every query meets every token that it may see, exactly once."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from prefixkit.attention.bsr import OPEN, decompose
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import CPU_COST, CostModel, HeadShape, decide_sharing
from prefixkit.testing.forests import make_snapshot, random_parents
from prefixkit.testing.named_trees import tree_of
from prefixkit.tree.radix import PrefixTree
from tests.attention import slow_formats
from tests.attention.trees import assert_same_rows, expected_sight, random_queries, random_tree, row_segments
from tests.seeds import seeds

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=8, itemsize=4)
FREE_SHARING = CostModel(item=0, kv_byte=1, partial_byte=0)
NEVER_SHARE = CostModel(item=1e9, kv_byte=1, partial_byte=1)


def seen(snapshot, queries, bsr):
    """For each query row, how often it meets each (node, offset), by the meaning of a BSR row."""
    length = StepTree(snapshot, queries).length
    position = snapshot.start[queries.row_node()] + queries.row_offset()
    counts = [Counter() for _ in range(queries.num_rows)]
    for row in range(len(bsr.causal)):
        for query in range(bsr.q_begin[row], bsr.q_end[row]):
            for node, begin, end in row_segments(bsr, row):
                for offset in range(begin, min(end, int(length[node]))):
                    if not bsr.causal[row] or snapshot.start[node] + offset <= position[query]:
                        counts[query][node, offset] += 1
    return counts


@seeds(30)
@pytest.mark.parametrize("sharing", ["cost model", "everything", "nothing", "at random"])
def test_every_query_sees_every_ancestor_token_exactly_once(seed, sharing):
    print("seed", seed)
    rng = np.random.default_rng(seed)
    snapshot = random_tree(rng, page_size=int(rng.choice([1, 4, 16]))).snapshot()
    queries = random_queries(rng, snapshot)
    cost = {"everything": FREE_SHARING, "nothing": NEVER_SHARE}.get(sharing, CPU_COST)
    shared = rng.random(snapshot.num_nodes) < 0.5 if sharing == "at random" else None
    rows = decompose(StepTree(snapshot, queries), SHAPE, cost, shared)
    for counts, expected in zip(seen(snapshot, queries, rows), expected_sight(snapshot, queries), strict=True):
        assert set(counts) == expected
        assert set(counts.values()) == {1}


def forest(rng):
    """Any forest, deep or broad, with empty nodes, and queries in some of its nodes."""
    parents = random_parents(rng, int(rng.choice([1, 3, 10, 40, 200])))
    lengths = rng.integers(0, int(rng.choice([2, 20, 2000])), len(parents))
    snapshot, _ = make_snapshot(rng, parents, lengths.tolist(), 16)
    if rng.random() < 0.3:  # queries in leaves only, as in decoding
        lengths[snapshot.subtree_end == np.arange(len(parents)) + 1] += 1
    chosen = np.flatnonzero((lengths > 0) & (rng.random(len(parents)) < rng.choice([0.2, 0.7, 1.0])))
    if not len(chosen):
        lengths[-1], chosen = lengths[-1] + 1, np.array([len(parents) - 1])
    snapshot.length[:], snapshot.computed[:] = lengths, lengths
    begin = rng.integers(0, lengths[chosen])
    end = rng.integers(begin, lengths[chosen]) + 1
    return snapshot, Queries(chosen.astype(np.int32), begin.astype(np.int32), end.astype(np.int32))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("block", range(5))
def test_formats_and_sharing_equal_those_made_node_by_node(block):
    """On 750 forests: what one reads in slow_formats is what the prefix sums give, array by array."""
    for seed in range(150 * block, 150 * block + 150):
        rng = np.random.default_rng(seed)
        snapshot, queries = forest(rng)
        shape = HeadShape(*[(4, 2), (8, 1), (6, 6), (32, 8)][rng.integers(4)], 128, 2)
        cost = CostModel(float(rng.choice([0, 0.02, 5])), 1 / 4.3e6, float(rng.choice([0, 1e-8, 3.5e-7])))
        cost = replace(cost, tile_item=float(rng.choice([0, 0.022])), decode_item=float(rng.choice([0, 0.003])))
        cost = replace(cost, read_by_tiles=int(rng.integers(2)), tile_path=float(rng.choice([0, 1, 30])))
        shared = rng.random(snapshot.num_nodes) < 0.5 if rng.random() < 0.2 else None
        ours = decompose(StepTree(snapshot, queries), shape, cost, shared)
        slow = slow_formats.decompose(snapshot, queries, shape, cost, shared)
        assert_same_rows(ours, slow, seed)


@pytest.mark.parametrize("nodes", [1500, 3000])
def test_sharing_by_level_and_node_by_node_agree(nodes):
    """Deep trees go one by one, broad ones level by level; both decide the same."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        parents = [-1, *(int(rng.integers(max(0, node // 3 - 5), node // 3 + 1)) for node in range(1, nodes))]
        children = [[] for _ in parents]
        for node, above in enumerate(parents[1:], 1):
            children[above].append(node)
        order, stack, renamed = {}, [0], []
        while stack:  # depth-first numbering
            node = stack.pop()
            order[node] = len(order)
            renamed.append(order[parents[node]] if parents[node] >= 0 else -1)
            stack += children[node]
        snapshot, _ = make_snapshot(rng, renamed, rng.integers(0, 60, nodes).tolist(), 16, orderly=True)
        tree = leaf_rows(snapshot)
        shape = HeadShape(8, 2, 128, 2)
        cost = CostModel(0.02, 1 / 4.3e6, 1e-8)
        decided = decide_sharing(tree, shape, cost)
        assert 0 < decided.sum() < (tree.below > 0).sum()
        assert np.array_equal(decided, slow_formats.decide_sharing(snapshot, tree.own_rows, tree.below, shape, cost))


def every_query(snapshot, *runs):
    """Those of :func:`leaf_rows`, and runs ``(node, begin, end)`` of nodes before them."""
    leaves = leaf_rows(snapshot).queries
    columns = zip(*runs, strict=True)
    both = zip(columns, (leaves.node, leaves.begin, leaves.end), strict=True)
    return Queries(*(np.concatenate((first, later)).astype(np.int32) for first, later in both))


def leaf_rows(snapshot):
    """A query row in the last token of every leaf that has one."""
    leaf = np.flatnonzero((snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1) & (snapshot.length > 0))
    end = snapshot.length[leaf]
    return StepTree(snapshot, Queries(leaf.astype(np.int32), end - 1, end))


def test_a_leaf_is_open_at_its_end_so_that_it_can_grow_under_the_plan():
    tree = PrefixTree(64)
    tree.insert([1, 2, 3])
    bsr = decompose(StepTree(tree.snapshot(), Queries(*map(np.int32, ([0], [0], [3])))), SHAPE, CPU_COST)
    assert row_segments(bsr, 0) == [(0, 0, OPEN)]


class TestSharing:
    def decide(self, prefix, leaves, cost=CPU_COST):
        tree = PrefixTree(4096)
        prompt = tree.insert(np.arange(prefix))
        for sequence in tree.fork(prompt, leaves):
            tree.extend(sequence, [1])
        snapshot = tree.snapshot()
        return bool(decide_sharing(leaf_rows(snapshot), SHAPE, cost)[0])

    def test_a_long_prefix_of_many_sequences_is_shared(self):
        assert self.decide(prefix=1000, leaves=32)

    def test_a_short_prefix_is_not_worth_another_item(self):
        assert not self.decide(prefix=2, leaves=32)

    def test_one_consumer_has_nothing_to_share(self):
        assert not self.decide(prefix=1000, leaves=1, cost=FREE_SHARING)

    def test_a_chain_above_a_shared_node_folds_into_it(self):
        tree = PrefixTree(4096)
        tree.insert(np.arange(300))
        prompt = tree.insert(np.arange(600))  # a chain: the first sequence ends inside the second
        for sequence in tree.fork(prompt, 16):
            tree.extend(sequence, [1])
        snapshot = tree.snapshot()
        assert snapshot.num_nodes == 18
        assert decide_sharing(leaf_rows(snapshot), SHAPE, CPU_COST)[:2].tolist() == [False, True]

    @pytest.mark.parametrize(("samples", "shared"), [(32, [False, True]), (64, [False, True]), (10, [True, True])])
    def test_a_node_whose_consumers_fill_their_tiles_joins_them(self, samples, shared):
        """A tile holds 8 queries: problems with 32 samples fill four each, as many as the examples would have."""
        tree = tree_of(f"3L b8 p800 m160 k{samples} s16")
        shape, cost = HeadShape(16, 1, 128, 2), CostModel(0.0, 2e-7, 1e-9, 1e-6, read_by_tiles=1)
        assert decide_sharing(leaf_rows(tree), shape, cost)[:2].tolist() == shared
        assert decide_sharing(leaf_rows(tree), shape, replace(cost, read_by_tiles=0))[:2].all()

    @pytest.mark.parametrize(("samples", "shared"), [(2, True), (8, False), (9, False), (10, True)])
    def test_few_samples_share_nothing_that_alone_would_take_tiles(self, samples, shared):
        """A decode item holds 2 queries.  The prompt of 1,000 tokens is read 7 to 9 times less if it is shared."""
        tree, shape = tree_of(f"2L b{samples} p1000 s16"), HeadShape(8, 2, 128, 2)
        cost = CostModel(0.0, 1 / shape.kv_bytes, 0.0, tile_path=8_000.0)
        assert decide_sharing(leaf_rows(tree), shape, cost)[0] == shared
        assert decide_sharing(leaf_rows(tree), shape, cost, paths=True)[0] == shared
        prompt_too = StepTree(tree, every_query(tree, (0, 990, 1000)))
        assert decide_sharing(prompt_too, shape, cost)[0]
        assert decide_sharing(leaf_rows(tree), shape, replace(cost, tile_path=0.0))[0]

    def test_costs_below_zero_are_refused(self):
        with pytest.raises(ValueError, match="kv_byte must be a time of at least 0"):
            CostModel(item=1, kv_byte=-1, partial_byte=0)


class TestRefusals:
    def queries(self, *runs):
        return Queries(*(np.array(column, dtype=np.int32) for column in zip(*runs, strict=True)))

    def tree(self):
        tree = PrefixTree(64)
        prompt = tree.insert([1, 2, 3, 4])
        tree.extend(tree.fork(prompt)[0], [5, 6])
        return tree, prompt

    def test_no_queries(self):
        empty = np.zeros(0, dtype=np.int32)
        with pytest.raises(ValueError, match="at least one query"):
            decompose(StepTree(self.tree()[0].snapshot(), Queries(empty, empty, empty)), SHAPE, CPU_COST)

    @pytest.mark.parametrize("runs", [[(1, 0, 1), (0, 0, 1)], [(0, 0, 1), (0, 1, 2)], [(2, 0, 1)], [(-1, 0, 1)]])
    def test_nodes_out_of_order_or_range(self, runs):
        with pytest.raises(ValueError, match="ascending order"):
            decompose(StepTree(self.tree()[0].snapshot(), self.queries(*runs)), SHAPE, CPU_COST)

    @pytest.mark.parametrize("run", [(0, 2, 2), (0, 0, 5), (0, -1, 2)])
    def test_a_run_outside_its_node(self, run):
        with pytest.raises(ValueError, match="non-empty slice"):
            decompose(StepTree(self.tree()[0].snapshot(), self.queries(run)), SHAPE, CPU_COST)

    def test_a_gap_in_the_kv_before_the_queries(self):
        with pytest.raises(ValueError, match="must begin where the KV is complete, at 0 or before"):
            decompose(StepTree(self.tree()[0].snapshot(), self.queries((0, 1, 4))), SHAPE, CPU_COST)

    def test_queries_below_a_node_whose_kv_is_not_complete(self):
        tree, prompt = self.tree()
        with pytest.raises(ValueError, match="compute ancestors first"):
            decompose(StepTree(tree.snapshot(), self.queries((0, 0, 3), (1, 0, 2))), SHAPE, CPU_COST)
        tree.mark_computed([prompt.node], [3])
        decompose(StepTree(tree.snapshot(), self.queries((0, 3, 4), (1, 0, 2))), SHAPE, CPU_COST)


@seeds(200)
def test_what_is_decided_is_never_slower_by_the_model_than_sharing_nothing(seed):
    rng = np.random.default_rng(seed)
    snapshot, queries = forest(rng)
    shape = HeadShape(8, 2, 128, 2)
    cost = CostModel(
        *(float(rng.choice(options)) for options in ([0, 0.02], [2e-7], [0, 1e-8, 3.5e-7], [0, 0.01], [0, 0.001]))
    )
    tree = StepTree(snapshot, queries)
    own, below = tree.own_rows, tree.below

    def total(shared):
        """Reading every node as often as it is read, and what the shared ones cost."""
        consumers, spent = np.zeros(snapshot.num_nodes + 1), 0.0
        for node in range(snapshot.num_nodes - 1, -1, -1):
            reads = 1 if shared[node] else consumers[node]
            spent += reads * snapshot.length[node] * shape.kv_bytes * cost.kv_byte
            if shared[node]:
                tiles = cost.decode_item if below[node] * 4 <= 8 else -(-below[node] // 32) * cost.tile_item
                spent += cost.item + tiles * shape.kv_heads + below[node] * shape.partial_bytes * cost.partial_byte
            consumers[snapshot.parent[node]] += reads + (own[node] > 0)
        return spent

    decided = decide_sharing(tree, shape, cost)
    nothing = total(np.zeros_like(decided))
    assert total(decided) <= nothing * (1 + 1e-12)
    assert not decided.any() or total(decided) < nothing
