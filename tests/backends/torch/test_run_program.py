"""The torch executor: how calls become results, whose memory that takes, and how long programs live."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import StepTree
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.sharing import CostModel
from prefixkit.attention.variants import (
    CAUSAL,
    Variant,
    alibi,
    attention_sinks,
    compose,
    register,
    sigmoid,
    sliding_window,
    soft_cap,
    variant,
)
from prefixkit.backends.torch import tuning
from prefixkit.backends.torch.host_planner import bind, find_plan
from prefixkit.backends.torch.program.layer_program import Program
from prefixkit.backends.torch.read_keys import Scratch
from prefixkit.testing.forests import (
    SHARE_ALL,
    SHARE_NONE,
    attend,
    plan_of,
    program_of,
    random_case,
    random_split_plan,
    run_on,
)
from tests.backends.torch.cases import decode_case

# Rows and merging


def test_rows_that_no_item_mentions_come_out_empty() -> None:
    case = decode_case(20, [5, 6, 7])
    plan = plan_of(case, SHARE_NONE)
    rest = plan.tile_items[plan.tile_items[:, 0] != 1]
    partial = replace(plan, counts=np.array([len(rest), *plan.counts[1:]], dtype=np.int32), tile_items=rest)
    (whole, _), (out, lse) = attend(case, plan), attend(case, partial)
    assert torch.equal(out[[0, 2]], whole[[0, 2]])
    assert torch.equal(out[1], torch.zeros(6, 32))
    assert torch.equal(lse[1], torch.full((6,), -torch.inf))


def test_a_query_that_its_variant_shows_nothing_is_empty() -> None:
    """Not NaN: a mask that hides even the query itself, for some heads."""
    blind = variant(mask_mod=lambda b, h, q, kv: (kv <= q) & ((h % 2 == 0) | (kv > q - 0)), name="blind")
    case = decode_case(20, [5, 6])
    for each in (blind, compose(soft_cap(3.0), blind)):
        out, lse = attend(case, plan_of(case, SHARE_ALL), register(each))
        assert torch.isfinite(out).all()
        assert torch.equal(out[:, 1::2], torch.zeros(2, 3, 32))
        assert torch.isneginf(lse[:, 1::2]).all()
        assert torch.isfinite(lse[:, ::2]).all()


@pytest.mark.parametrize("leaves", [[5, 6, 7], [5] * 70], ids=["grouped heads", "heads in order"])
@pytest.mark.parametrize("cost", [SHARE_ALL, SHARE_NONE], ids=["several partials", "one"])
def test_sinks_join_the_sum_of_the_row(leaves: list[int], cost: CostModel) -> None:
    """As one more key without a value: to a rounding of the log-sum-exp, as it is without sinks."""
    sinks = torch.tensor([-3.0, 0.0, 2.0, 4.0, 8.0, 30.0])
    case = replace(decode_case(40, leaves), sinks=sinks)
    (plain, lse), (out, joined) = (
        attend(case, plan_of(case, cost), register(variant)) for variant in (CAUSAL, attention_sinks())
    )
    exact = torch.logaddexp(lse.double(), sinks.double())
    torch.testing.assert_close(joined.double(), exact, rtol=2 * torch.finfo(torch.float32).eps, atol=0.0)
    torch.testing.assert_close(out, plain * torch.exp(lse - exact).float().unsqueeze(-1), rtol=1e-5, atol=1e-7)


def test_a_row_that_no_item_mentions_has_its_sinks_only() -> None:
    sinks = torch.arange(6.0)
    case = replace(decode_case(20, [5, 6, 7]), sinks=sinks)
    plan = plan_of(case, SHARE_NONE)
    for mentioned in (plan.tile_items[plan.tile_items[:, 0] != 1], plan.tile_items[:0]):
        partial = replace(
            plan, counts=np.array([len(mentioned), *plan.counts[1:]], dtype=np.int32), tile_items=mentioned
        )
        out, lse = attend(case, partial, register(attention_sinks()))
        assert torch.equal(out[1], torch.zeros(6, 32))
        assert torch.equal(lse[1], sinks)


# Programs


CPU = torch.device("cpu")


def test_a_step_compiles_once_for_all_layers() -> None:
    case = decode_case(40, [5, 6, 7])
    step = bind(plan_of(case, SHARE_ALL), StepTree(case.snapshot, case.queries))
    window = register(sliding_window(9))

    def program(pages: int = len(case.k_pages), key: str = "causal", dtype: torch.dtype = torch.float32) -> Program:
        return find_plan(step.tensors[-1]).program((pages, 16, 2, 32), 6, dtype, CPU, key)

    made = [program(), program(99), program(key=window), program(dtype=torch.bfloat16)]
    assert len(set(map(id, made))) == len(made), "another pool, variant or dtype is another program"
    assert made == [program(), program(99), program(key=window), program(dtype=torch.bfloat16)]


def test_programs_go_with_their_step() -> None:
    held: list[weakref.ref[object]] = []
    for shared in range(20, 24):
        case = decode_case(shared, [5, 6])
        step = bind(plan_of(case, SHARE_ALL), StepTree(case.snapshot, case.queries))
        found = find_plan(step.tensors[-1])
        held += [weakref.ref(found), weakref.ref(found.program(case.k_pages.shape, 6, torch.float32, CPU, "causal"))]
        del step, found
    gc.collect()
    assert [one() for one in held] == [None] * 8


def test_a_bound_plan_does_not_follow_its_arrays() -> None:
    """Once a layer has run, the step's numbers are the program's own."""
    case = decode_case(40, [5, 6, 7])
    step = bind(plan_of(case, SHARE_ALL), StepTree(case.snapshot, case.queries))

    def out() -> torch.Tensor:
        args = case.q, case.k_pages, case.v_pages, case.positions, step.tensors, case.scale, "causal"
        return torch.ops.prefixkit.tree_attention(*args)[0]  # type: ignore[no-any-return]

    before = out()
    case.snapshot.length[0], case.snapshot.pages[0], step.plan.tile_items[:] = 30, 1, 0
    assert torch.equal(out(), before)


def test_threads_do_not_share_buffers() -> None:
    cases = [decode_case(64, list(range(1 + i, 40 + i))) for i in range(4)]
    plans = [plan_of(case, SHARE_ALL) for case in cases]
    expected = [attend(case, plan)[0] for case, plan in zip(cases, plans, strict=True)]
    start = threading.Barrier(4)

    def work(i: int) -> bool:
        start.wait()
        return all(torch.equal(attend(cases[i], plans[i])[0], expected[i]) for _ in range(30))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_come_and_go(first: bool) -> None:
    """Buffers and programs made inside it serve outside, and the other way round; larger ones come while it is on."""
    for size, inference in ((20, first), (20, not first), (50, first), (50, not first)):
        with torch.inference_mode(inference):
            case = decode_case(size, [size, size - 1])
            for variant in (CAUSAL, soft_cap(3.0)):
                out, _ = attend(case, plan_of(case, SHARE_ALL), register(variant))
                given = case.snapshot, case.row_node, case.positions.numpy(), case.q, case.k_pages, case.v_pages
                exact = reference_attention(*given, case.scale, variant).out
                torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


def test_a_thread_keeps_no_more_than_its_bound() -> None:
    scratch, most = Scratch(), tuning.CPU.call_elements
    kept = scratch.matrix(0, 10, 64, torch.float32)
    assert scratch.matrix(0, 5, 64, torch.float32).data_ptr() == kept.data_ptr()
    large = scratch.matrix(0, most + 1, 1, torch.float32)
    assert large.shape == (most + 1, 1)
    assert scratch.matrix(0, 10, 64, torch.float32).data_ptr() == kept.data_ptr(), (
        "still there, and what is larger is not"
    )
    for use in (0, 1):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for rows in (most // 64, most // 64 + 1, 2 * most // 64):
                scratch.matrix(use, rows, 64, dtype)
    assert sum(buffer.nbytes for buffer in scratch.buffers.values()) <= 256 * 2**20


def test_what_a_thread_keeps_goes_with_it() -> None:
    scratch = Scratch()
    held: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        scratch.matrix(0, 10, 64, torch.float32)
        held.extend(weakref.ref(buffer) for buffer in scratch.buffers.values())

    thread = threading.Thread(target=work)
    thread.start(), thread.join()
    gc.collect()
    assert len(held) == 1 and held[0]() is None
    assert not scratch.buffers


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every ``empty`` comes filled with NaN, in Python and inside torch's kernels."""
    fill_before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fill_before  # type: ignore[attr-defined]


@pytest.mark.parametrize("variant", [CAUSAL, sliding_window(9), soft_cap(2.0)], ids=lambda v: v.name)
@pytest.mark.parametrize("seed", range(10))
def test_every_element_is_written(seed: int, variant: Variant, request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    cost = (SHARE_ALL, SHARE_NONE)[seed % 2]
    plan = random_split_plan(rng, case, cost) if seed % 3 == 0 else plan_of(case, cost)
    clean = attend(case, plan, register(variant))
    request.getfixturevalue("poisoned_memory")
    poisoned = attend(case, plan, register(variant))
    assert all(map(torch.equal, clean, poisoned))
    assert all(torch.isfinite(result).all() for result in poisoned)


@pytest.mark.parametrize("group_rows", [1, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_biases_that_are_too_large_to_hold_are_made_in_each_run(seed: int, group_rows: int) -> None:
    """The same numbers; -inf among them hides keys, and rows that see no other are empty."""
    rng = np.random.default_rng(seed)
    case = random_case(rng, heads=(6, 2, 32))
    table = torch.from_numpy(rng.standard_normal((6, 500), dtype=np.float32))
    table[:, : int(rng.integers(1, 40))] = -torch.inf  # early queries see nothing
    of = variant(lambda s, b, h, q, kv: s + table[h, kv] - q * 0.01)
    plan, costs = plan_of(case, SHARE_ALL), replace(tuning.CPU, group_rows=group_rows)
    held, made = (program_of(case, plan, of, each) for each in (costs, replace(costs, call_elements=1)))
    assert {call.biased for call in held.calls} == {False} and {call.biased for call in made.calls} == {True}
    results = [run_on(case, program, of) for program in (held, made)]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    where = case.snapshot, case.row_node, case.positions.numpy()
    exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, of)
    torch.testing.assert_close(results[1][1].double(), exact.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[1][0].double(), exact.out, rtol=1e-4, atol=1e-5)
    assert bool((exact.lse == -torch.inf).any()) == bool((results[1][0] == 0).all(dim=2).any())


def test_a_score_that_does_not_depend_on_products() -> None:
    case = random_case(np.random.default_rng(1), heads=(6, 2, 32))
    of = variant(lambda s, b, h, q, kv: kv * 0.1)
    where = case.snapshot, case.row_node, case.positions.numpy()
    exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, of)
    out, lse = attend(case, plan_of(case, SHARE_ALL), register(of))
    torch.testing.assert_close(out.double(), exact.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("more", [(), (sliding_window(9), alibi([0.5, 0.25, 1.0, 0.1]))], ids=["alone", "composed"])
def test_sigmoids_add_up(more: tuple[Variant, ...], seed: int) -> None:
    """Partial states of shared and own nodes merge to sums: no weight depends on other keys."""
    of = compose(sigmoid(), *more)
    case = random_case(np.random.default_rng(seed), heads=(4, 2, 32))
    out, lse = attend(case, plan_of(case, SHARE_ALL if seed % 2 else SHARE_NONE), register(of))
    where = case.snapshot, case.row_node, case.positions.numpy()
    exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, of)
    torch.testing.assert_close(out.double(), exact.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-5, atol=1e-5)
