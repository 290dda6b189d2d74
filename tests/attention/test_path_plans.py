"""Plans of heavy paths: their items, and attention by them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.bsr import OPEN, MaskKind, decompose, decompose_unchecked
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.paths.runs import runs_of, with_runs
from prefixkit.attention.plan import KINDS, Plan, make_plan
from prefixkit.attention.planner import Planner
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.attention.step import Step, build_step
from prefixkit.attention.variants import (
    CAUSAL,
    attention_sinks,
    chunked,
    compose,
    register,
    sliding_window,
    variant,
)
from prefixkit.attention.visible import ALL, Visible
from prefixkit.backends.torch import run_program
from prefixkit.backends.torch.program.layer_program import compile_program
from prefixkit.backends.torch.tuning import CPU, Heads
from prefixkit.testing.forests import SHARE_ALL, Case, attend, fill, gpu_program_of, program_of, run_on
from prefixkit.testing.named_trees import leaf_queries, tree_of
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.snapshot import TreeSnapshot
from tests.attention.path_steps import COSTS, SHAPE, marks, random_step
from tests.attention.planners import PLANNERS, in_torch
from tests.attention.plans import SMALL
from tests.attention.torch_errors import Errors, Truth, check_forests
from tests.attention.trees import expected_sight
from tests.seeds import seeds

# Plans


def items_meet(tree: StepTree, plan: Plan) -> list[Counter[tuple[int, int]]]:
    """For each query row, how often it meets each position and slot, by the meaning of a plan's items."""
    start, length, page_indptr, pages, first_slot = with_runs(tree.arrays(), plan.runs)
    size = tree.snapshot.page_size
    counts: list[Counter[tuple[int, int]]] = [Counter() for _ in tree.positions]
    for q_begin, q_end, partial, seg, packed, *_ in plan.items.tolist():
        kind = packed % KINDS
        assert kind != MaskKind.LIMIT or partial >= 0, "an item of kind LIMIT always writes partial states"
        for node, begin, end in plan.segments[seg : seg + packed // KINDS].tolist():
            for offset in range(begin, min(end, int(length[node]))):
                position, within = int(start[node]) + offset, int(first_slot[node]) + offset
                slot = int(pages[page_indptr[node] + within // size]) * size + within % size
                for query in range(q_begin, q_end):
                    last = OPEN
                    if kind == MaskKind.OWN:
                        last = int(tree.positions[query])
                    elif kind == MaskKind.LIMIT:
                        last = int(plan.limits[partial + query - q_begin])
                    if position <= last:
                        counts[query][position, slot] += 1
    return counts


@seeds(30)
@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (64, 1)], ids=str)
def test_items_cover_every_visible_token_of_every_query_once(seed: int, heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    tree, shape = random_step(rng), HeadShape(*heads, 64, 2)
    visible = (ALL, Visible(int(rng.integers(1, 24))), Visible(chunk=int(rng.integers(1, 24))))[seed % 3]
    begin, shared, runs = visible.begin(tree.positions), marks(rng, tree), runs_of(tree.snapshot)
    rows = decompose(tree, shape, SHARE_ALL, shared, visible, paths=True)
    whole = decompose_unchecked(tree, shape, SHARE_ALL, shared, paths=True, runs=runs, tiles=visible)
    num_rows, gpus = tree.queries.num_rows, ((7, SMALL), (132, H200))
    plans = [make_gpu_plan([of], tree.length, num_rows, shape, *gpu) for of in (rows, whole) for gpu in gpus]
    for plan in (*plans, make_plan([rows], tree.length, num_rows)):
        found = items_meet(tree, plan)
        for first, counts, sight in zip(begin, found, expected_sight(tree.snapshot, tree.queries), strict=True):
            met = [count for (position, _), count in counts.items() if position >= first]
            assert len(met) == sum(tree.snapshot.start[node] + at >= first for node, at in sight) and set(met) == {1}


def test_tiles_of_a_path_read_up_to_their_last_querys_limit() -> None:
    """64 leaves at a spine of 64 nodes: tiles of 4 queries read on from each other by about 4 nodes."""
    snapshot = tree_of("comb d64 b1 t16 s16")
    tree = StepTree(snapshot, leaf_queries(snapshot))
    shape = HeadShape(32, 1, 128, 2)
    rows = decompose(tree, shape, SHARE_ALL, paths=True)
    plan = make_gpu_plan([rows], tree.length, 64, shape, 1, replace(H200, tile=replace(H200.tile, least=10**6)))
    limited = plan.items[plan.items[:, 4] % KINDS == MaskKind.LIMIT]
    assert len(limited) == 16
    before = np.concatenate(([0], np.cumsum(plan.segments[:, 2] - plan.segments[:, 1])))
    for q_begin, q_end, partial, seg, packed, *_ in limited.tolist():
        limits = plan.limits[partial : partial + q_end - q_begin]
        assert before[seg + packed // KINDS] - before[seg] == limits[-1] + 1 == min(16 * q_end, 16 * 63)
        assert q_end - q_begin == 4


def test_tiles_of_a_path_begin_where_the_first_of_their_queries_sees() -> None:
    """A window is a second limit: what a tile reads of a long path is about what its queries see of it."""
    snapshot = tree_of("spine p512 d255 t20 s4")
    tree, shape = StepTree(snapshot, leaf_queries(snapshot)), HeadShape(32, 1, 128, 2)
    rows = decompose(tree, shape, SHARE_ALL, visible=Visible(window=100), paths=True)
    plan = make_gpu_plan([rows], tree.length, tree.queries.num_rows, shape, 132, H200)
    assert (rows.kind == MaskKind.LIMIT).any()
    seen = int((tree.positions + 1 - Visible(window=100).begin(tree.positions)).sum())
    assert plan.kv_tokens_read(tree.length) < seen
    limited = plan.items[plan.items[:, 4] % KINDS == MaskKind.LIMIT]
    assert len(limited) == 64, "one KV split each"


@seeds(20)
def test_the_same_tree_gives_the_same_plan(seed: int) -> None:
    plans = []
    for _ in range(2):
        rng = np.random.default_rng(seed)
        tree = random_step(rng)
        rows = decompose(tree, SHAPE, SHARE_ALL, paths=True)
        plans.append(make_gpu_plan([rows], tree.length, tree.queries.num_rows, SHAPE, 7, SMALL))
    assert all(map(np.array_equal, *(plan.arrays() for plan in plans)))


# Attention


# As if calls were dear, so that tiles are padded and batched; and as if trees were large.
TUNINGS = replace(CPU, call_us=1e6), replace(CPU, call_us=1e-6, call_elements=1 << 10, scored_rows=3, masked_rows=3)
VARIANTS = {
    "causal": lambda rng: CAUSAL,
    "window": lambda rng: sliding_window(int(rng.integers(1, 40))),
    "chunks": lambda rng: chunked(int(rng.integers(1, 40))),
    "both": lambda rng: compose(sliding_window(int(rng.integers(1, 40))), chunked(int(rng.integers(1, 40)))),
    "sinks": lambda rng: attention_sinks(),
    "by head": lambda rng: variant(mask_mod=lambda b, h, q, kv: (kv <= q) & ((q - kv < 3 + 4 * h) | (kv % 5 == h % 3))),
}


def random_case(rng: np.random.Generator) -> Case:
    tree = random_step(rng, 60)
    pages = int(tree.snapshot.pages.max(initial=0)) + 1
    return fill(rng, tree.snapshot, pages, tree.queries, (6, 2, 32), torch.float32, float(rng.choice([0.3, 1.0, 4.0])))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_by_paths_is_within_torchs_error(name: str) -> None:
    """By the op and by other programs, whole rows and items for a GPU, whatever is shared."""

    def judge(errors: Errors, seed: int) -> None:
        rng = np.random.default_rng([seed, sorted(VARIANTS).index(name)])
        case, chosen = random_case(rng), VARIANTS[name](rng)
        truth, tree = Truth.of(case, chosen), StepTree(case.snapshot, case.queries)
        rows = decompose(tree, case.shape, COSTS[rng.integers(3)], marks(rng, tree), chosen.visible, paths=True)
        num_rows = case.queries.num_rows
        for plan in (
            make_plan([rows], tree.length, num_rows),
            make_gpu_plan([rows], tree.length, num_rows, case.shape, 7, SMALL),
        ):
            errors.add(seed, truth, *attend(case, plan, register(chosen)))
            errors.add(seed, truth, *run_on(case, gpu_program_of(case, plan, chosen), chosen))
            errors.add(seed, truth, *run_on(case, program_of(case, plan, chosen, TUNINGS[seed % 2]), chosen))

    check_forests(judge, 9)


@pytest.mark.parametrize("name", ["comb d300 b1 t2 s5", "comb d40 b3 t20 s9"])
def test_answers_do_not_depend_on_the_order_of_children(name: str) -> None:
    """The same numbers in a tree that lists its children in another order, within rounding."""
    snapshot = tree_of(name)
    rng = np.random.default_rng(0)
    case = fill(rng, snapshot, len(snapshot.pages), leaf_queries(snapshot), (6, 2, 32), torch.float32)
    turned, order = other_order(snapshot, rng)
    other = replace(case, snapshot=turned, queries=leaf_queries(turned))
    row_of = np.argsort(case.queries.node)[np.searchsorted(case.queries.node, order[other.queries.node])]
    other = replace(other, q=case.q[torch.from_numpy(row_of)])
    answers = []
    for each in (case, other):
        tree = StepTree(each.snapshot, each.queries)
        rows = decompose(tree, each.shape, CPU_COST, paths=True)
        answers.append(attend(each, make_plan([rows], tree.length, each.queries.num_rows)))
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours[torch.from_numpy(row_of)], theirs, rtol=1e-4, atol=1e-5)


def other_order(snapshot: TreeSnapshot, rng: np.random.Generator) -> tuple[TreeSnapshot, NDArray[np.int64]]:
    """The tree with the children of each node shuffled, and which of its nodes each of the new one is."""
    children: list[list[int]] = [[] for _ in range(snapshot.num_nodes + 1)]
    for node, above in enumerate(snapshot.parent.tolist()):
        children[above].append(node)
    order, stack = [], children[-1][::-1]
    while stack:
        order.append(stack.pop())
        stack += rng.permutation(children[order[-1]]).tolist()
    to = np.argsort(order)
    size = (snapshot.subtree_end - np.arange(snapshot.num_nodes))[order]
    columns = {name: getattr(snapshot, name)[order] for name in ("start", "length", "computed", "first_slot")}
    held = np.diff(snapshot.page_indptr)[order]
    pages = [snapshot.pages[snapshot.page_indptr[node] : snapshot.page_indptr[node + 1]] for node in order]
    above = snapshot.parent[order]
    turned = replace(
        snapshot,
        **columns,
        parent=np.where(above >= 0, to[above], -1).astype(np.int32),
        subtree_end=(np.arange(len(order)) + size).astype(np.int32),
        page_indptr=np.concatenate(([0], np.cumsum(held))).astype(np.int32),
        pages=np.concatenate(pages),
    )
    return turned, np.array(order)


def test_keys_that_are_expanded_are_read_once() -> None:
    """Where K and V are computed for each call, a path is one block of rows; else each of its blocks reads a prefix."""
    snapshot = tree_of("comb d300 b1 t2 s5")
    tree = StepTree(snapshot, leaf_queries(snapshot))
    plan = make_plan([decompose(tree, SHAPE, SHARE_ALL, paths=True)], tree.length, 300)
    read = []
    for expanded in (True, False):
        heads = Heads(*astuple(SHAPE), tuning=CPU)
        where = {"on_cpu": True, "device": torch.device("cpu"), "expanded": expanded}
        program = compile_program(plan, tree, len(snapshot.pages), heads, CAUSAL, torch.float32, **where)
        read.append(sum(call.length for call in program.calls if call.rows > 1))
    assert read[0] == 299 * 2 < read[1], "all that two queries see"


# Planners


@pytest.mark.parametrize("make", PLANNERS.values(), ids=PLANNERS)
def test_a_kept_plan_of_a_deep_tree_computes_what_a_new_one_does(make: Callable[[], Planner]) -> None:
    """A spine of 40 nodes of one token, adjacent in memory, and a leaf at each that grows: the runs stay."""
    tree = PrefixTree(256, page_size=4)
    spine, leaves = tree.insert(np.arange(9)), []
    for level in range(40):
        leaves += tree.fork(spine)
        tree.extend(spine, [100 + level])
    tree.extend_each([*leaves, spine], np.arange(41))
    planner, steps = make(), []
    for number in range(3):
        snapshot = tree.snapshot()
        tree.mark_computed(tree.nodes(), snapshot.length)
        steps.append(step_of(planner, tree))
        kept, made = attention(steps[-1]), attention(step_of(make(), tree))
        for ours, theirs in zip(kept, made, strict=True):
            torch.testing.assert_close(ours, theirs)
        tree.extend_each([*leaves, spine], np.arange(41) + number)
    assert planner.plans_made == 1
    plan = steps[-1].plans[0].plan
    assert plan.runs is not None and len(plan.runs) == 1
    if len(steps[-1].plan) > 1:
        start, length, page_indptr, *_ = (tensor.numpy() for tensor in steps[-1].plan[7:])
        assert len(start) == tree.snapshot().num_nodes + 1 == len(page_indptr) - 1
        assert start[-1] == 0 and length[-1] == 9 + 39


def step_of(planner: Planner, tree: PrefixTree) -> Step:
    """The step of the last token of each leaf."""
    snapshot = tree.snapshot()
    step = StepTree(replace(snapshot, computed=snapshot.length), leaf_queries(snapshot))
    return build_step(step, np.zeros(step.queries.num_rows), np.zeros(0, np.int64), planner)


def attention(step: Step) -> tuple[Tensor, Tensor]:
    """Attention of a step in plain torch, over numbers that are always the same."""
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=numbers) for shape in ((step.num_rows, 4, 8), (256, 4, 2, 8), (256, 4, 2, 8))
    )
    out, lse = run_program.tree_attention(q, k, v, step.positions, in_torch(step), 0.3, "causal")
    return out, lse


@pytest.mark.parametrize("name", ["spine p2048 d1023 t1 s16", "search p700 n400 t5-60", "search p100 n4000 t1-9"])
def test_plans_of_deep_trees_say_how_long_they_take(name: str) -> None:
    snapshot = tree_of(name)
    began, shape = time.perf_counter(), HeadShape(32, 8, 128, 2)
    tree = StepTree(snapshot, leaf_queries(snapshot))
    rows = decompose(tree, shape, H200.sharing, paths=True)
    plan = make_gpu_plan([rows], tree.length, tree.queries.num_rows, shape, 132, H200)
    print(f"{name}: {snapshot.num_nodes} nodes planned in {1e3 * (time.perf_counter() - began):.1f} ms")
    assert int(plan.counts[3]) <= 13 * tree.queries.num_rows
