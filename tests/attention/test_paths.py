"""Heavy paths: shared parts of them are one list, of which each query sees a prefix."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache
from math import floor, log2

import numpy as np
import pytest

from prefixkit.attention.bsr import BSR, OPEN, MaskKind, decompose
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.paths.runs import with_runs
from prefixkit.attention.queries import StepTree, decode_tree
from prefixkit.attention.sharing import CostModel, HeadShape, decide_sharing
from prefixkit.attention.visible import ALL, Visible
from prefixkit.testing.forests import SHARE_ALL, SHARE_NONE, make_snapshot, random_parents
from prefixkit.testing.named_trees import leaf_queries, tree_of
from prefixkit.tree.snapshot import TreeSnapshot
from tests.attention.formats_reference import tokens_of
from tests.attention.path_steps import COSTS, SHAPE, beams, marks, random_step
from tests.attention.slow_paths import decide_paths, rows_by_paths
from tests.attention.trees import expected_sight
from tests.seeds import seeds

# Formats


@pytest.mark.parametrize("block", range(4))
def test_paths_equal_those_made_node_by_node(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        rng = np.random.default_rng(seed)
        tree = random_step(rng, 60)
        shape = HeadShape(*[(4, 2), (8, 1), (6, 6), (32, 8)][rng.integers(4)], 128, 2)
        cost = CostModel(float(rng.choice([0, 0.02])), 1 / 4.3e6, float(rng.choice([0, 1e-8, 1e-7])))
        cost = replace(cost, tile_item=float(rng.choice([0, 0.002])), decode_item=float(rng.choice([0, 0.001])))
        cost = replace(cost, tile_path=float(rng.choice([0, 0.01, 0.3])))
        decided = decide_sharing(tree, shape, cost, paths=True)
        assert np.array_equal(decided, decide_paths(tree, shape, cost)), seed
        shared = marks(rng, tree)
        rows = decompose(tree, shape, cost, shared, paths=True)
        expected = rows_by_paths(tree, decided if shared is None else shared)
        assert len(expected) == len(rows.kind), seed
        for row, (begin, end, kind, segments, limits) in enumerate(expected):
            assert (rows.q_begin[row], rows.q_end[row], rows.kind[row]) == (begin, end, kind), seed
            assert tokens_of(tree, rows, row) == tokens_in(tree, segments), seed
            assert limits_of(rows, row) == limits, seed


def tokens_in(tree: StepTree, segments: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Position and slot of each token of some slices of nodes."""
    found = []
    for node, begin, end in segments:
        offset = np.arange(begin, min(end, tree.length[node]))
        positions, slots = tree.snapshot.start[node] + offset, tree.snapshot.slots(np.array(node), offset)
        found += zip(positions.tolist(), slots.tolist(), strict=True)
    return found


def limits_of(rows: BSR, row: int) -> list[int]:
    queries = np.where(rows.kind == MaskKind.LIMIT, rows.q_end - rows.q_begin, 0)
    first = int(queries[:row].sum())
    return rows.limit[first : first + int(queries[row])].tolist()


def meetings(tree: StepTree, rows: BSR, visible: Visible = ALL) -> list[Counter[int]]:
    """For each query row, how often it meets each slot of those that it may see, by the meaning of a BSR row."""
    begin, positions = visible.begin(tree.positions), tree.positions
    counts: list[Counter[int]] = [Counter() for _ in positions]
    for row, kind in enumerate(rows.kind):
        tokens, limits = tokens_of(tree, rows, row), iter(limits_of(rows, row))
        for query in range(rows.q_begin[row], rows.q_end[row]):
            last = next(limits) if kind == MaskKind.LIMIT else positions[query] if kind == MaskKind.OWN else OPEN
            counts[query].update(slot for position, slot in tokens if begin[query] <= position <= last)
    return counts


@seeds(150)
def test_every_query_meets_each_visible_token_once(seed: int) -> None:
    """Whatever is shared, in windows and chunks too; no list begins before what one of its queries sees."""
    rng = np.random.default_rng(seed)
    tree = random_step(rng)
    visible = (ALL, Visible(int(rng.integers(1, 24))), Visible(chunk=int(rng.integers(1, 24))))[seed % 3]
    rows = decompose(tree, SHAPE, COSTS[rng.integers(3)], marks(rng, tree), visible, paths=True)
    begin = visible.begin(tree.positions)
    found = meetings(tree, rows, visible)
    for query, (counts, sight) in enumerate(zip(found, expected_sight(tree.snapshot, tree.queries), strict=True)):
        node, offset = (np.array(column) for column in zip(*sight, strict=True))
        seen = tree.snapshot.start[node] + offset >= begin[query]
        assert set(counts) == set(tree.snapshot.slots(node, offset)[seen].tolist())
        assert set(counts.values()) == {1}
    for row in range(len(rows.kind)):
        tokens = tokens_of(tree, rows, row)
        if not tokens:  # of nodes of no tokens
            assert not visible.limits
            continue
        assert tokens[0][0] == rows.first[row] >= begin[rows.q_begin[row] : rows.q_end[row]].min()
        positions, limits = [position for position, _ in tokens], limits_of(rows, row)
        assert positions == sorted(set(positions))
        assert limits == sorted(limits) and (not limits or limits[-1] == positions[-1])


def test_a_row_of_which_all_queries_see_everything_has_no_limits() -> None:
    """Two levels are what they are without paths, and so is a chain that nothing leaves."""
    for parents in ([-1, 0, 0, 0], [-1, 0, 1, 1, 1]):
        snapshot, _ = make_snapshot(np.random.default_rng(0), parents, [40] * len(parents), 16)
        leaf = np.arange(len(parents) - 3, len(parents), dtype=np.int32)
        for cost in COSTS:
            rows = decompose(decode_tree(snapshot, leaf), SHAPE, cost, paths=True)
            assert not (rows.kind == MaskKind.LIMIT).any() and len(rows.limit) == 0


@seeds(40)
def test_partial_states_of_a_query_are_few(seed: int) -> None:
    """At most 1 + log2 of the query rows, where the heaviest child is listed last."""
    rng = np.random.default_rng(seed)
    snapshot = heaviest_last(random_parents(rng, int(rng.integers(2, 400))), rng)
    tree = StepTree(snapshot, leaf_queries(snapshot))
    rows = decompose(tree, SHAPE, SHARE_ALL, paths=True)
    states = np.zeros(tree.queries.num_rows, dtype=int)
    for begin, end in zip(rows.q_begin, rows.q_end, strict=True):
        states[begin:end] += 1
    assert states.max() <= 1 + floor(log2(tree.queries.num_rows))
    assert rows.node.max() < snapshot.num_nodes + (0 if rows.runs is None else len(rows.runs))


def heaviest_last(parents: list[int], rng: np.random.Generator) -> TreeSnapshot:
    """A tree of these parents in which the child with the most leaves is listed last."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, above in enumerate(parents):
        children[above].append(node)
    weight = [1] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        if children[node]:
            weight[node] = sum(weight[child] for child in children[node])
    order, stack, numbered, renamed = [], children[-1][::-1], dict[int, int](), list[int]()
    while stack:
        node = stack.pop()
        numbered[node] = len(order)
        order.append(node)
        renamed.append(numbered.get(parents[node], -1))
        stack += sorted(children[node], key=weight.__getitem__, reverse=True)
    return make_snapshot(rng, renamed, rng.integers(1, 20, len(order)).tolist(), 4)[0]


# Large trees

LARGE = (
    "spine p1 d63 t1 s1",
    "spine p20 d255 t1-64 s1-64",
    "spine p2048 d1023 t1 s16",
    "spine p512 d4095 t1-64 s1-8",
    "search p700 n400 t5-60",
    "search p10 n3000 t1-3",
    "turns b16 p2048 k8 d4 t300",
    "beams",
)


@cache
def large_tree(name: str) -> TreeSnapshot:
    return beams(8, 2000) if name == "beams" else tree_of(name)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "cost"),
    [*((name, H200.sharing) for name in LARGE), *zip(LARGE, itertools.cycle((SHARE_ALL, SHARE_NONE)), strict=False)],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_lists_of_large_trees_follow_each_other_without_gap_or_overlap(name: str, cost: CostModel) -> None:
    """What a query meets are intervals of positions from 0 to its own, on the way from its root; partials are few."""
    snapshot = large_tree(name)
    tree = StepTree(snapshot, leaf_queries(snapshot))
    rows = decompose(tree, HeadShape(32, 8, 128, 2), cost, paths=True)
    met: list[list[tuple[int, int, int]]] = [[] for _ in tree.positions]
    for row, kind in enumerate(rows.kind):
        of = range(rows.q_begin[row], rows.q_end[row])
        part, first = slice(*rows.indptr[row : row + 2]), int(rows.first[row])
        whole = first - 1 + int((rows.end[part].astype(np.int64) - rows.begin[part]).sum())
        last = limits_of(rows, row) if kind == MaskKind.LIMIT else [whole] * len(of)
        last = tree.positions[of].tolist() if kind == MaskKind.OWN else last
        for query, position in zip(of, last, strict=True):
            met[query].append((first, position, row))
    for query, lists in enumerate(met):
        bounds = [(first, last) for first, last, _ in sorted(lists)]
        assert [first for first, _ in bounds] == [0, *(last + 1 for _, last in bounds[:-1])]
        assert bounds[-1][1] == tree.positions[query]
        assert len(lists) <= 1 + floor(log2(len(met)))
    rng = np.random.default_rng(0)
    for query in rng.choice(len(met), 5).tolist():
        found = []
        for _, last, row in sorted(met[query]):
            found += [slot for position, slot in tokens_of(tree, rows, row) if position <= last]
        node, offset = tree.queries.node[query], tree.positions[query] - snapshot.start[tree.queries.node[query]]
        assert found == slots_of(snapshot, int(node), int(offset) + 1)


def slots_of(snapshot: TreeSnapshot, node: int, count: int) -> list[int]:
    """The slots from a root to the first ``count`` tokens of a node."""
    found = list[np.ndarray]()
    while node >= 0:
        found.append(snapshot.slots(np.array(node), np.arange(count)))
        node = int(snapshot.parent[node])
        count = int(snapshot.length[node])
    return np.concatenate(found[::-1]).tolist()


# Runs


def test_nodes_that_go_on_from_each_others_slots_are_one_run() -> None:
    """A chain of inner nodes in pages of 4, cut after 6, 8 and 13 tokens; a leaf at each, and a gap after 13."""
    snapshot, pages = make_snapshot(
        np.random.default_rng(0), [-1, 0, 0, 2, 2, 4, 4, 6], [6, 3, 2, 3, 5, 3, 4, 3], 4, orderly=True
    )
    assert pages == len(snapshot.pages)
    first_slot, page_indptr = snapshot.first_slot.copy(), [0, 2, 3, 4, 5, 7, 8, 9, 10]
    first_slot[2] = 2  # goes on in the root's last page
    table = [5, 7, 0, 7, 1, 3, 9, 2, 8, 6]
    laid = replace(snapshot, first_slot=first_slot, page_indptr=np.int32(page_indptr), pages=np.int32(table))
    tree = StepTree(laid, leaf_queries(laid))
    rows = decompose(tree, SHAPE, SHARE_ALL, paths=True)
    assert rows.runs is not None and len(rows.runs) == 1
    assert rows.runs.pages.tolist() == [5, 7, 3, 9]
    assert (rows.runs.start[0], rows.runs.length[0], rows.runs.first_slot[0]) == (0, 13, 0)
    assert rows.node[rows.indptr[0] : rows.indptr[1]].tolist() == [8], "the list is one segment"
    assert limits_of(rows, 0) == [5, 7, 12, 12][: len(limits_of(rows, 0))]


@seeds(60)
def test_a_run_holds_the_slots_of_its_nodes(seed: int) -> None:
    """A segment of a run is what the segments of its nodes would be: rows without runs have the same tokens."""
    rng = np.random.default_rng(seed)
    tree = random_step(rng, 80)
    rows = decompose(tree, SHAPE, SHARE_NONE, marks(rng, tree), paths=True)
    start, length, page_indptr, pages, first_slot = with_runs(tree.arrays(), rows.runs)
    assert len(start) == len(length) == len(first_slot) == len(page_indptr) - 1 and page_indptr[-1] == len(pages)
    capacity = np.diff(page_indptr) * tree.snapshot.page_size - first_slot
    closed = rows.end != OPEN
    assert np.all(rows.end[closed] <= length[rows.node[closed]])
    assert np.all((length <= capacity) | (length == 0))


# Costs


@seeds(200)
def test_what_is_decided_is_never_slower_by_the_model_than_sharing_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_step(rng, 200)
    shape = HeadShape(8, 2, 128, 2)
    options = [0, 0.02], [2e-7], [0, 1e-9, 1e-8], [0, 0.001], [0, 0.0001]
    cost = CostModel(*(float(rng.choice(each)) for each in options))
    by_token, by_row = cost.kv_byte * shape.kv_bytes, cost.partial_byte * shape.partial_bytes

    def total(rows: BSR) -> float:
        """Reading each list once, and what rows that several queries share cost."""
        tokens = np.minimum(rows.end, with_runs(tree.arrays(), rows.runs)[1][rows.node]) - rows.begin
        queries = (rows.q_end - rows.q_begin)[~rows.causal]
        tiles = np.where(queries * 4 <= 8, cost.decode_item, -(-queries // 32) * cost.tile_item) * shape.kv_heads
        return float(tokens.sum() * by_token + (cost.item + tiles + queries * by_row).sum())

    decided = decompose(tree, shape, cost, paths=True)
    nothing = decompose(tree, shape, cost, np.zeros(tree.snapshot.num_nodes, dtype=bool), paths=True)
    assert total(decided) <= total(nothing) * (1 + 1e-12)
    assert bool(decided.causal.all()) or total(decided) < total(nothing)


def test_deep_trees_are_those_with_many_shared_nodes_above_a_query_and_many_above_all() -> None:
    deep = {"comb d8 b8 t1 s3": False, "beam d6": False, "3L fewshot": False, "chain d64 b3 p20 t2": False}
    deep |= {"comb d9 b11 t1 s3": False, "comb d9 b12 t1 s3": True, "beams b32 p500 n32": False}
    assert {name: StepTree(tree_of(name), leaf_queries(tree_of(name))).is_deep for name in deep} == deep
