"""Visible ranges: what is out of sight is not read, and nothing else is lost."""

from __future__ import annotations

import operator
from collections import Counter

import numpy as np
import pytest
import torch

from prefixkit.attention.bsr import BSR, decompose
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.plan import Plan, make_plan
from prefixkit.attention.planner import MOST_UNSEEN, Planner
from prefixkit.attention.queries import Queries, StepTree, decode_tree
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.sharing import CPU_COST, HeadShape, decide_sharing
from prefixkit.attention.variants import CAUSAL, Variant, chunked, compose, register, sliding_window
from prefixkit.attention.visible import ALL, Visible
from prefixkit.backends.cuda.device_planner import CudaPlanner, count_reads
from prefixkit.backends.torch.host_planner import TorchPlanner
from prefixkit.testing.forests import (
    SHARE_ALL,
    SHARE_NONE,
    Case,
    attend,
    fill,
    gpu_program_of,
    make_snapshot,
    random_case,
    run_on,
)
from tests.attention.plans import SMALL, items_of
from tests.attention.trees import assert_same_rows, expected_sight, random_queries, random_tree, row_segments
from tests.seeds import seeds

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=8, itemsize=4)
CPU = torch.device("cpu")


def random_variant(rng: np.random.Generator, longest: int = 24) -> Variant:
    """Windows and chunks, and both at once."""
    window, chunk = sliding_window(int(rng.integers(1, longest))), chunked(int(rng.integers(1, longest)))
    return (window, chunk, compose(window, chunk))[rng.integers(3)]


# Ranges


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_a_range_begins_where_the_first_visible_key_is(window: int | None, chunk: int | None) -> None:
    shown = Visible(window, chunk)
    parts = [sliding_window(window)] if window else []
    variant = compose(*parts, *([chunked(chunk)] if chunk else []))
    positions = np.arange(30)
    assert shown.limits == bool(variant.mask_mods) and variant.visible == shown
    for position, begin in zip(positions.tolist(), shown.begin(positions).tolist(), strict=True):
        q, none = torch.tensor([[position]]), torch.zeros(1, 1, 1, dtype=torch.int64)
        kv = torch.arange(position + 1)[None]
        seen = kv[0][variant.shows(none, none, q, kv).expand(1, 1, position + 1).reshape(-1)]
        assert begin == int(seen.min())


def test_ranges_of_no_token_are_refused() -> None:
    for arguments in ({"window": 0}, {"chunk": 0}, {"window": 3, "chunk": -1}):
        with pytest.raises(ValueError, match="must be at least 1 token"):
            Visible(**arguments)


def test_a_variant_says_what_it_shows() -> None:
    assert CAUSAL.visible == ALL
    assert sliding_window(7).visible == Visible(window=7)
    assert chunked(7).visible == Visible(chunk=7)
    assert compose(chunked(9), sliding_window(7), chunked(8)).visible == Visible(7, 8)


# Formats


def begins(tree: StepTree, visible: Visible) -> list[int]:
    return [int(first) for first in visible.begin(tree.positions)]


@seeds(80)
def test_every_query_meets_each_visible_token_once_and_rows_read_little_else(seed: int) -> None:
    """A row reads from the first position that one of its queries sees on, and no row is of a node out of sight."""
    rng = np.random.default_rng(seed)
    snapshot = random_tree(rng, page_size=4).snapshot()
    queries = random_queries(rng, snapshot)
    tree, visible = StepTree(snapshot, queries), random_variant(rng).visible
    first, position = begins(tree, visible), tree.positions.tolist()
    shared = rng.random(snapshot.num_nodes) < 0.5 if seed % 2 else None
    rows = decompose(tree, SHAPE, (CPU_COST, SHARE_ALL, SHARE_NONE)[seed % 3], shared, visible)
    counts: list[Counter[tuple[int, int]]] = [Counter() for _ in position]
    for row in range(len(rows.causal)):
        of = range(rows.q_begin[row], rows.q_end[row])
        reads = []
        for node, begin, end in row_segments(rows, row):
            reads += [(node, offset) for offset in range(begin, min(end, int(tree.length[node])))]
        lowest = min(first[query] for query in of)
        assert reads and all(snapshot.start[node] + offset >= lowest for node, offset in reads)
        for query in of:
            for node, offset in reads:
                at = int(snapshot.start[node]) + offset
                if first[query] <= at and (not rows.causal[row] or at <= position[query]):
                    counts[query][node, offset] += 1
    sight = expected_sight(snapshot, queries)
    for query, (got, seen) in enumerate(zip(counts, sight, strict=True)):
        assert set(got) == {(node, at) for node, at in seen if snapshot.start[node] + at >= first[query]}
        assert set(got.values()) == {1}


@seeds(20)
def test_a_range_that_hides_nothing_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    snapshot = random_tree(rng, page_size=4).snapshot()
    tree = StepTree(snapshot, random_queries(rng, snapshot))
    whole, wide = (decompose(tree, SHAPE, CPU_COST, visible=each) for each in (ALL, Visible(10**6, 10**6)))
    assert_same_rows(wide, whole)


def test_nodes_out_of_sight_are_neither_read_nor_shared() -> None:
    """A prompt of 1,000 tokens, answers of 200 that each go on twice, by 100 tokens and by 40."""
    parents, lengths = [-1, 0, 1, 1, 0, 4, 4], [1000, 200, 100, 40, 200, 100, 40]
    snapshot, _ = make_snapshot(np.random.default_rng(0), parents, lengths, 16, orderly=True)
    leaf = np.array([2, 3, 5, 6], dtype=np.int32)
    tree = decode_tree(snapshot, leaf)
    for window, expected in ((90, {2: 90, 3: 90, 5: 90, 6: 90}), (150, {1: 110, 2: 100, 3: 40, 4: 110, 5: 100, 6: 40})):
        rows = decompose(tree, SHAPE, SHARE_ALL, visible=Visible(window=window))
        plan = make_plan([rows], tree.length, 4)
        if window == 150:
            read = dict.fromkeys(expected, 0)
            for *_, segments in items_of(plan):
                for node, begin, end in segments:
                    read[node] += min(end, int(tree.length[node])) - begin
            assert read == expected
            assert decide_sharing(tree, SHAPE, SHARE_ALL, Visible(window=window)).tolist() == [
                False, True, False, False, True, False, False,
            ]  # fmt: skip
        assert 0 not in rows.node.tolist()
    assert decide_sharing(tree, SHAPE, SHARE_ALL)[0]


def test_consumers_are_those_that_see_a_node() -> None:
    """One of eight samples still sees the prompt: it alone reads it."""
    lengths = [600] + [5] + [300] * 7
    snapshot, _ = make_snapshot(np.random.default_rng(0), [-1] + [0] * 8, lengths, 16, orderly=True)
    tree = decode_tree(snapshot, np.arange(1, 9, dtype=np.int32))
    assert decide_sharing(tree, SHAPE, SHARE_ALL, Visible(window=400)).tolist()[0]
    assert not decide_sharing(tree, SHAPE, SHARE_ALL, Visible(window=200)).any()
    rows = decompose(tree, SHAPE, SHARE_ALL, visible=Visible(window=200))
    assert [row_segments(rows, row)[0][:2] for row in range(8)] == [(0, 405), *((leaf, 100) for leaf in range(2, 9))]


# Attention


def plan_for(case: Case, rng: np.random.Generator, visible: Visible) -> Plan:
    tree = StepTree(case.snapshot, case.queries)
    cost = (CPU_COST, SHARE_ALL, SHARE_NONE)[rng.integers(3)]
    shared = rng.random(case.snapshot.num_nodes) < 0.5 if rng.random() < 0.4 else None
    formats: list[BSR] = [decompose(tree, case.shape, cost, shared, visible)]
    if rng.random() < 0.5:
        return make_gpu_plan(formats, tree.length, case.queries.num_rows, case.shape, 7, SMALL)
    return make_plan(formats, tree.length, case.queries.num_rows)


def assert_exact(case: Case, plan: Plan, variant: Variant) -> None:
    where = case.snapshot, case.row_node, case.positions.numpy()
    exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, variant)
    runs = attend(case, plan, register(variant)), run_on(case, gpu_program_of(case, plan, variant), variant)
    for out, lse in runs:
        torch.testing.assert_close(out.double(), exact.out, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-4, atol=2e-5)


@seeds(60)
def test_attention_by_a_plan_of_visible_ranges_is_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    variant = random_variant(rng, 40)
    assert_exact(case, plan_for(case, rng, variant.visible), variant)


# Planners

PLANNERS = {
    "torch": lambda visible: TorchPlanner(SHAPE, CPU_COST, visible),
    "cuda": lambda visible: CudaPlanner(SHAPE, SMALL, 7, visible=visible),
}


def most_read(planner: Planner, tree: StepTree) -> int:
    """Tokens that a new plan's rows see, and a KV tile for each row."""
    rows = planner.formats(tree)[0]
    seen = count_reads(rows, tree.length, SHAPE, planner.cost)
    return seen + MOST_UNSEEN * len(rows.causal)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("make", PLANNERS.values(), ids=PLANNERS)
@pytest.mark.parametrize(
    ("visible", "plans"),
    [(ALL, 1), (Visible(window=50), 4), (Visible(window=10**6), 1), (Visible(chunk=100), 4), (Visible(chunk=40), 4)],
    ids=str,
)
def test_a_plan_serves_while_it_reads_at_most_a_kv_tile_more(make, visible: Visible, plans: int) -> None:  # type: ignore[no-untyped-def]
    """Positions 90 to 329: of a window each plan serves 65 steps, of chunks of 100 one chunk, of 40 two chunks."""
    parents, lengths = [-1, 0, 0, 0], [90, 1, 1, 1]
    snapshot, _ = make_snapshot(np.random.default_rng(0), parents, lengths, 512, orderly=True)
    step, planner = decode_tree(snapshot, np.arange(1, 4, dtype=np.int32)), make(visible)
    for _ in range(240):
        planned, _ = planner.plan(step, CPU)
        assert planned.kv_tokens_read(step.length) <= most_read(planner, step)
        step = step.grown(1)
    assert planner.plans_made == plans


@pytest.mark.parametrize(
    "variant",
    [sliding_window(20), chunked(16), compose(sliding_window(9), chunked(12))],
    ids=operator.attrgetter("name"),
)
def test_a_kept_plan_computes_what_a_new_one_does(variant: Variant) -> None:
    """Each decode step by the plan that the planner has kept, against exact attention."""
    rng = np.random.default_rng(3)
    lengths = [30, 12, 5, 40, 3]
    snapshot, num_pages = make_snapshot(rng, [-1, 0, 1, 1, 0], lengths, 256, orderly=True)
    leaf = np.array([2, 3, 4], dtype=np.int32)
    planner = TorchPlanner(HeadShape(6, 2, 32, 4), SHARE_ALL, variant.visible)
    step = decode_tree(snapshot, leaf)
    made = []
    for _ in range(90):
        planned, _ = planner.plan(step, CPU)
        case = fill(rng, step.snapshot, num_pages, step.queries, (6, 2, 32), torch.float32)
        assert_exact(case, planned.plan, variant)
        made.append(planner.plans_made)
        step = step.grown(1)
    assert 1 < planner.plans_made <= 8


def test_queries_that_see_more_than_the_last_ones_are_planned_anew() -> None:
    """The same node of the same tree, but an earlier token of it."""
    snapshot, _ = make_snapshot(np.random.default_rng(0), [-1], [200], 16, orderly=True)
    planner = TorchPlanner(SHAPE, CPU_COST, Visible(window=10))
    for begin, reads in ((150, 50 + 9), (140, 50 + 9 + 10), (40, 160 + 9)):
        queries = Queries(*(np.array([x], dtype=np.int32) for x in (0, begin, begin + 1)))
        tree = StepTree(snapshot, queries)
        planned, _ = planner.plan(tree, CPU)
        assert planned.kv_tokens_read(tree.length) == reads
    assert planner.plans_made == 3


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="asks the GPU for its kernels")


@pytest.mark.parametrize("backend", ["host_planner", pytest.param("device_planner", marks=NEEDS_GPU)])
def test_a_backends_planner_takes_the_range(backend: str) -> None:
    from prefixkit.backends.cuda import device_planner
    from prefixkit.backends.torch import host_planner

    module, device = {"host_planner": (host_planner, CPU), "device_planner": (device_planner, torch.device("cuda"))}[
        backend
    ]
    planner = module.planner_for(HeadShape(8, 2, 192, 2, 128), device, torch.bfloat16, Visible(window=9))
    assert planner.visible == Visible(window=9)
