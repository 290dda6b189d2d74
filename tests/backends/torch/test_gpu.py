"""The torch executor as a GPU runs it, which runs anywhere: gathered keys, scores in memory, head-major pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.plan import Plan
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.variants import (
    CAUSAL,
    Variant,
    alibi,
    attention_sinks,
    compose,
    sliding_window,
    soft_cap,
    variant,
)
from prefixkit.backends.cuda.checked_mode import check_packed_numbers
from prefixkit.backends.torch import tuning
from prefixkit.backends.torch.run_program import run_program
from prefixkit.ops.partial_states import State
from prefixkit.testing.forests import (
    SHARE_ALL,
    SHARE_NONE,
    Case,
    gpu_plan_of,
    gpu_program_of,
    int_tensors,
    node_tensors,
    plan_of,
    random_case,
    random_split_plan,
    run_on,
)
from tests.seeds import seeds


def variant_of(rng: np.random.Generator, seed: int, heads: int) -> Variant:
    variants: list[Variant] = [
        CAUSAL,
        sliding_window(int(rng.integers(1, 20))),
        soft_cap(5.0),
        alibi(rng.random(heads)),
        attention_sinks(),
    ]
    return variants[seed % len(variants)]


def exact(case: Case, variant: Variant) -> State:
    where = case.snapshot, case.row_node, case.positions.numpy()
    sinks = case.sinks_for(variant)
    return reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, variant, sinks)


def check(results: tuple[Tensor, Tensor], case: Case, variant: Variant) -> None:
    expected = exact(case, variant)
    for ours, theirs in zip(results, (expected.out, expected.lse), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def plan_as(kind: str, rng: np.random.Generator, case: Case, seed: int) -> Plan:
    cost = SHARE_ALL if seed % 2 else SHARE_NONE
    if kind == "split":
        return random_split_plan(rng, case, cost)
    if kind == "whole":
        return plan_of(case, cost)
    plan = gpu_plan_of(case, cost)
    work, nodes = int_tensors(*plan.arrays()), node_tensors(case)
    check_packed_numbers(len(case.q), case.k_pages.shape[:2], work, nodes)
    return plan


@pytest.mark.parametrize("kind", ["whole", "for the kernels", "split"])
@seeds(20)
def test_a_forest_under_a_variant_equals_the_reference(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    variant = variant_of(rng, seed, case.q.shape[1])
    program = gpu_program_of(case, plan_as(kind, rng, case, seed), variant)
    check(run_on(case, program, variant), case, variant)


@seeds(20)
def test_large_tiles_are_split_to_bound_the_memory(seed: int) -> None:
    """Of scores, masks and gathered keys."""
    rng = np.random.default_rng(seed)
    case = random_case(rng, heads=(4, 2, 32))
    variant = variant_of(rng, seed, 4)
    costs = replace(tuning.GPU, scored_rows=4, call_elements=600, batch_elements=600)
    program = gpu_program_of(case, plan_of(case, SHARE_ALL), variant, costs)
    for call in program.calls:
        assert call.rows <= 4
        assert call.batch * call.rows * call.length * 4 <= 600
        assert call.batch * call.length * 2 * 32 <= 600
    check(run_on(case, program, variant), case, variant)


def test_calls_are_padded_only_where_that_is_cheaper_than_another_call() -> None:
    case = random_case(np.random.default_rng(2), heads=(4, 2, 32))
    plan = plan_of(case, SHARE_NONE)
    dear, cheap = (gpu_program_of(case, plan, CAUSAL, replace(tuning.GPU, call_us=us)) for us in (1e6, 1e-9))
    assert len(dear.calls) < len(cheap.calls)
    for program in (dear, cheap):
        check(run_on(case, program), case, CAUSAL)


def test_a_query_that_sees_nothing_is_empty() -> None:
    blind = variant(mask_mod=lambda b, h, q, kv: (kv <= q) & ((h % 2 == 0) | (kv > q - 0)), name="blind")
    case = replace(random_case(np.random.default_rng(4), heads=(4, 2, 32)), sinks=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    out, lse = run_on(case, gpu_program_of(case, plan_of(case, SHARE_ALL), blind), blind)
    assert torch.equal(out[:, 1::2], torch.zeros(len(case.q), 2, 32))
    assert torch.isneginf(lse[:, 1::2]).all()
    assert torch.isfinite(lse[:, ::2]).all()
    both = compose(blind, attention_sinks())
    out, lse = run_on(case, gpu_program_of(case, plan_of(case, SHARE_ALL), both), both)
    assert torch.equal(out[:, 1::2], torch.zeros(len(case.q), 2, 32))
    assert torch.equal(lse[:, 1::2], torch.tensor([2.0, 4.0]).expand(len(case.q), 2))


@pytest.mark.parametrize("seed", range(5))
def test_it_reads_pages_of_any_layout(seed: int) -> None:
    case = random_case(np.random.default_rng(seed), heads=(4, 2, 32))
    program = gpu_program_of(case, plan_of(case, SHARE_ALL))
    token_major = run_program(program, case.q, case.k_pages, case.v_pages, case.scale, CAUSAL)
    assert all(map(torch.equal, token_major, run_on(case, program)))


def test_a_tree_that_names_missing_pages_is_refused() -> None:
    case = random_case(np.random.default_rng(1))
    plan = plan_of(case, SHARE_ALL)
    case.snapshot.pages[:] += 1000
    with pytest.raises(IndexError, match="nodes name slots"):
        gpu_program_of(case, plan)
