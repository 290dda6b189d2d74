"""Mask kinds of block-sparse rows: all of the KV list, the own node causally, or a limit for each query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.attention.bsr import BSR, MaskKind, decompose
from prefixkit.attention.plan import Plan, make_plan
from prefixkit.attention.queries import Queries, StepTree, decode_tree
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.attention.variants import CAUSAL, Variant, attention_sinks, register, sliding_window, soft_cap
from prefixkit.backends.torch.tuning import CPU, Tuning
from prefixkit.ops.partial_states import State
from prefixkit.testing.forests import (
    SHARE_ALL,
    SHARE_NONE,
    Case,
    attend,
    fill,
    gpu_program_of,
    make_snapshot,
    program_of,
    random_case,
    run_on,
)
from tests.attention.formats_reference import formats_attention
from tests.seeds import seeds

VARIANTS = {"causal": CAUSAL, "window": sliding_window(6), "cap": soft_cap(4.0), "sinks": attention_sinks()}
SHAPE = HeadShape(6, 2, 32, 4)


def limit_rows(tree: StepTree, rows: Sequence[tuple[int, int, list[tuple[int, int, int]], list[int]]]) -> BSR:
    """Rows of kind LIMIT: first and last query, segments, and a limit for each query."""
    lists, ends = [row[2][0] for row in rows], [row[2][-1] for row in rows]
    segments = np.array([segment for row in rows for segment in row[2]], dtype=np.int32).reshape(-1, 3)
    q_begin, q_end = (np.array([row[i] for row in rows], dtype=np.int32) for i in (0, 1))
    return BSR(
        q_begin,
        q_end,
        np.full(len(rows), MaskKind.LIMIT, dtype=np.int32),
        np.cumsum([0, *(len(row[2]) for row in rows)]).astype(np.int32),
        *segments.T,
        first=np.array([tree.snapshot.start[node] + begin for node, begin, _ in lists], dtype=np.int32),
        last=np.array([tree.snapshot.start[node] + end - 1 for node, _, end in ends], dtype=np.int32),
        limit=np.array([limit for row in rows for limit in row[3]], dtype=np.int32),
    )


def random_limits(rng: np.random.Generator, case: Case) -> BSR:
    """Any slices of the way from a root to a node, in pieces, read by any queries up to any limits."""
    tree = StepTree(case.snapshot, case.queries)
    nodes = np.flatnonzero(tree.length > 0)
    rows = []
    for _ in range(int(rng.integers(1, 5))):
        begin = int(rng.integers(case.queries.num_rows))
        end = int(rng.integers(begin, case.queries.num_rows)) + 1
        node, tokens = int(rng.choice(nodes)), []
        while node >= 0:
            tokens = [*((node, at) for at in range(tree.length[node])), *tokens]
            node = int(case.snapshot.parent[node])
        low = int(rng.integers(len(tokens)))
        tokens = tokens[low : int(rng.integers(low, len(tokens))) + 1]
        segments: list[tuple[int, int, int]] = []
        for node, at in tokens:
            if segments and segments[-1][0] == node and segments[-1][2] == at and rng.random() < 0.9:
                segments[-1] = (node, segments[-1][1], at + 1)
            else:
                segments.append((node, at, at + 1))
        first = int(case.snapshot.start[segments[0][0]]) + segments[0][1]
        limits = rng.integers(first - 2, first + len(tokens) + 2, end - begin)
        rows.append((begin, end, segments, sorted(limits.tolist())))
    return limit_rows(tree, rows)


def exact(case: Case, formats: Sequence[BSR], variant: Variant) -> State:
    tree = StepTree(case.snapshot, case.queries)
    sinks = case.sinks_for(variant)
    return formats_attention(tree, formats, case.q, case.k_pages, case.v_pages, case.scale, variant, sinks)


def assert_exact(found: tuple[torch.Tensor, torch.Tensor], state: State) -> None:
    for ours, theirs in zip(found, state, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=3e-5)


def planned(case: Case, formats: Sequence[BSR]) -> Plan:
    return make_plan(formats, StepTree(case.snapshot, case.queries).length, case.queries.num_rows)


TUNINGS = (
    CPU,
    # As if forests were large: runs detached, keys split, tiles of a few rows.
    replace(CPU, call_us=1e-6, call_elements=1 << 10, scored_rows=3, group_rows=2),
)


@pytest.mark.parametrize("variant", VARIANTS)
@seeds(12)
def test_random_limits_beside_a_tree_are_exact(seed: int, variant: str) -> None:
    rng = np.random.default_rng([seed, sorted(VARIANTS).index(variant)])
    case, chosen = random_case(rng, heads=(6, 2, 32)), VARIANTS[variant]
    cost = (CPU_COST, SHARE_ALL, SHARE_NONE)[seed % 3]
    formats = [decompose(StepTree(case.snapshot, case.queries), case.shape, cost), random_limits(rng, case)]
    if seed % 4 == 0:
        formats = formats[1:]
    plan, state = planned(case, formats), exact(case, formats, chosen)
    costs: Tuning = TUNINGS[seed % 2]
    assert_exact(attend(case, plan, register(chosen)), state)
    assert_exact(run_on(case, program_of(case, plan, chosen, costs), chosen), state)
    assert_exact(run_on(case, gpu_program_of(case, plan, chosen), chosen), state)


@seeds(20)
def test_the_oracle_of_formats_equals_that_of_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    formats = [decompose(StepTree(case.snapshot, case.queries), case.shape, SHARE_ALL)]
    where = case.snapshot, case.row_node, case.positions.numpy()
    state = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale)
    for ours, theirs in zip(exact(case, formats, CAUSAL), state, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


# Paths


def comb(levels: int, tokens: int, own: int) -> tuple[Case, list[BSR]]:
    """A chain with a leaf at each node that decodes: the chain is one row, which each leaf sees up to its parent."""
    parents: list[int] = []
    lengths, chain = [], []
    for level in range(levels):
        parents.append(chain[-1] if level else -1)
        chain.append(len(parents) - 1)
        lengths.append(tokens)
        parents.append(chain[-1])
        lengths.append(own + level % 3)
    rng = np.random.default_rng(levels)
    snapshot, num_pages = make_snapshot(rng, parents, lengths, 16)
    leaf = np.array([node + 1 for node in chain], dtype=np.int32)
    tree = decode_tree(snapshot, leaf)
    case = fill(rng, snapshot, num_pages, tree.queries, (6, 2, 32), torch.float32)
    limits = [(level + 1) * tokens - 1 for level in range(levels)]
    path = limit_rows(tree, [(0, levels, [(node, 0, tokens) for node in chain], limits)])
    whole = decompose(tree, SHAPE, SHARE_NONE, np.zeros(len(parents), dtype=bool))
    last = whole.indptr[1:] - 1
    own_rows = replace(
        whole,
        indptr=np.arange(levels + 1, dtype=np.int32),
        node=whole.node[last],
        begin=whole.begin[last],
        end=whole.end[last],
        first=snapshot.start[whole.node[last]],
        last=whole.last,
    )
    return case, [path, own_rows]


@pytest.mark.parametrize(("levels", "tokens"), [(2, 5), (40, 3), (300, 2), (12, 200)])
@pytest.mark.parametrize("variant", [CAUSAL, sliding_window(50)], ids=lambda variant: variant.name)
def test_a_path_with_limits_equals_a_tree(levels: int, tokens: int, variant: Variant) -> None:
    case, formats = comb(levels, tokens, 4)
    where = case.snapshot, case.row_node, case.positions.numpy()
    state = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, variant)
    plan = planned(case, formats)
    assert_exact(attend(case, plan, register(variant)), state)
    assert plan.counts[3] == 2 * levels, "two partial states a row, however deep the tree"
    tree = StepTree(case.snapshot, case.queries)
    assert plan.kv_tokens_read(tree.length) == levels * tokens + int(case.snapshot.length[case.queries.node].sum())


def test_a_path_is_read_about_once() -> None:
    """Each block of rows reads up to its own highest limit, not to the path's end."""
    case, formats = comb(256, 8, 1)
    program = program_of(case, planned(case, formats))
    on_path = [call for call in program.calls if call.length > 8]
    assert sum(call.batch * call.rows * call.length for call in on_path) <= 128 * (128 * 8 + 256 * 8)


# Order and refusals


def test_any_order_of_formats_gives_the_same_plan() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        case = random_case(rng)
        formats = [decompose(StepTree(case.snapshot, case.queries), case.shape, SHARE_ALL), random_limits(rng, case)]
        one, two = planned(case, formats), planned(case, formats[::-1])
        items = [
            sorted(
                (*plan.items[item, :2].tolist(), *plan.items[item, 4:].tolist(), limits_of(plan, item))
                for item in range(len(plan.items))
            )
            for plan in (one, two)
        ]
        assert items[0] == items[1]
        assert all(map(torch.equal, attend(case, one), attend(case, two)))


def limits_of(plan: Plan, item: int) -> tuple[int, ...]:
    q_begin, q_end, partial, _, shape = plan.items[item, :5].tolist()
    return tuple(plan.limits[partial : partial + q_end - q_begin].tolist()) if shape % 4 == MaskKind.LIMIT else ()


def test_limits_change_nothing_where_there_are_none() -> None:
    rng = np.random.default_rng(0)
    case = random_case(rng)
    plan = planned(case, [decompose(StepTree(case.snapshot, case.queries), case.shape, CPU_COST)])
    assert len(plan.limits) == 0
    assert len(plan.arrays()) == 7


@pytest.mark.parametrize(
    ("limits", "message"),
    [([1, 2], "one entry for each of 3 query rows, got 2"), ([1, 3, 2], "ascend, got 3 before 2")],
)
def test_limits_that_cannot_be_are_refused(limits: list[int], message: str) -> None:
    case, (path, own) = comb(3, 5, 2)
    bad = replace(path, limit=np.array(limits, dtype=np.int32))
    with pytest.raises(ValueError, match=message):
        planned(case, [bad, own])


def test_limits_stand_while_leaves_grow() -> None:
    """Limits are positions, and a list of kind LIMIT is closed, whatever its last node does."""
    rng = np.random.default_rng(0)
    snapshot, num_pages = make_snapshot(rng, [-1, 0], [20, 8], 64, orderly=True)
    queries = Queries(*(np.array([x], dtype=np.int32) for x in (1, 7, 8)))
    step = StepTree(snapshot, queries)
    format_ = limit_rows(step, [(0, 1, [(0, 5, 20), (1, 0, 6)], [25])])
    plan = make_plan([format_], step.length, 1)
    for _ in range(3):
        case = fill(rng, step.snapshot, num_pages, step.queries, (6, 2, 32), torch.float32)
        assert_exact(attend(case, plan), exact(case, [format_], CAUSAL))
        assert plan.kv_tokens_read(step.length) == 21
        step = step.grown(1)
