"""Attention to tokens that are selected for each query, and with a bias of each."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.queries import StepTree
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.attention.variants import CAUSAL, Variant, attention_sinks, compose, register, sliding_window
from prefixkit.attention.variants import variant as variant_of
from prefixkit.backends.torch.host_planner import bind
from prefixkit.backends.torch.run_program import expanded_attention
from prefixkit.ops.arguments import BadDtype, BadShape
from prefixkit.ops.partial_states import State
from prefixkit.testing.forests import SHARE_ALL, SHARE_NONE, Case, plan_of, random_case, random_split_plan

VARIANTS = {"causal": CAUSAL, "window": sliding_window(5), "sinks": attention_sinks()}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def attend(  # type: ignore[no-untyped-def]
    case: Case, plan, selected: Tensor | None, variant: Variant = CAUSAL, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    k, v = case.k_pages, case.v_pages
    shape = HeadShape(case.q.shape[1], k.shape[2], k.shape[3], case.q.itemsize, v.shape[3])
    step = bind(plan, StepTree(case.snapshot, case.queries), shape)
    rest = step.tensors, case.scale, register(variant), case.sinks_for(variant)
    return expanded_attention(case.q, (k, v), None, case.positions, *rest, selected, bias)


def _biased(bias: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + bias[h, kv]


def _selected(selected: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return selected[kv] & (kv <= q)


def exact(case: Case, selected: Tensor, variant: Variant, bias: Tensor | None = None) -> State:
    """Row by row, for each has a mask of its own, and a bias."""
    states, of_row = [], selected[0].clone()
    added = None if bias is None else bias[0].clone()
    score_mod = None if added is None else partial(_biased, added)
    both = compose(variant_of(score_mod, partial(_selected, of_row), name="selected"), variant)
    for row in range(len(case.q)):
        of_row.copy_(selected[row])
        if bias is not None and added is not None:
            added.copy_(bias[row])
        one = slice(row, row + 1)
        where = case.snapshot, case.row_node[one], case.positions.numpy()[one], case.q[one]
        states.append(reference_attention(*where, case.k_pages, case.v_pages, case.scale, both, case.sinks_for(both)))
    return State(*map(torch.cat, zip(*states, strict=True)))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("v_dim", [None, 24])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_query_sees_what_is_selected_for_it(dtype: torch.dtype, v_dim: int | None, variant: str, seed: int) -> None:
    """In trees of any shape; of some rows nothing is selected."""
    rng, chosen = np.random.default_rng([seed, dtype.itemsize]), VARIANTS[variant]
    case = random_case(rng, dtype, (6, 2, 32), v_dim)
    cost = (CPU_COST, SHARE_ALL, SHARE_NONE)[rng.integers(3)]
    plan = random_split_plan(rng, case, cost) if rng.random() < 0.3 else plan_of(case, cost)
    shape = len(case.q), int(case.positions.max()) + 1
    selected = torch.from_numpy(rng.random(shape) < rng.random((shape[0], 1)))
    selected[rng.random(shape[0]) < 0.1] = False
    for ours, theirs in zip(attend(case, plan, selected, chosen), exact(case, selected, chosen), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_bias_of_each_query_is_added_to_its_scores(dtype: torch.dtype, variant: str, seed: int) -> None:
    """For each head and position; with tokens selected or without."""
    rng, chosen = np.random.default_rng([seed, dtype.itemsize]), VARIANTS[variant]
    case = random_case(rng, dtype, (6, 2, 32))
    plan = plan_of(case, (CPU_COST, SHARE_ALL, SHARE_NONE)[rng.integers(3)])
    shape = len(case.q), 6, int(case.positions.max()) + 1
    bias = torch.from_numpy(rng.normal(size=shape)).to(dtype)
    selected = torch.from_numpy(rng.random(shape[::2]) < rng.choice([0.5, 1.0]))
    given = None if bool(selected.all()) else selected
    want = exact(case, selected, chosen, bias.double())
    for ours, theirs in zip(attend(case, plan, given, chosen, bias), want, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_bias_is_of_each_row_and_head() -> None:
    case = random_case(np.random.default_rng(0), torch.float32, (6, 2, 32))
    plan, rows = plan_of(case, CPU_COST), len(case.q)
    with pytest.raises(BadShape, match=rf"bias must have shape \[{rows}, 6, positions\]"):
        attend(case, plan, None, bias=torch.zeros(rows, 2, 9))
    with pytest.raises(BadDtype, match=r"bias must be torch\.float32"):
        attend(case, plan, None, bias=torch.zeros(rows, 6, 9, dtype=torch.int64))


def test_without_a_selection_it_is_attention_over_k_and_v() -> None:
    case = random_case(np.random.default_rng(0), torch.float32, (6, 2, 32))
    plan = plan_of(case, CPU_COST)
    step = bind(plan, StepTree(case.snapshot, case.queries))
    rest = case.positions, step.tensors, case.scale, "causal"
    want = torch.ops.prefixkit.tree_attention(case.q, case.k_pages, case.v_pages, *rest)
    for ours, theirs in zip(attend(case, plan, None), want, strict=True):
        assert torch.equal(ours, theirs)


def test_a_selection_of_other_rows_is_refused() -> None:
    case = random_case(np.random.default_rng(0), torch.float32, (6, 2, 32))
    rows, plan = len(case.q), plan_of(case, CPU_COST)
    with pytest.raises(BadShape, match=rf"selected must have shape \[{rows}, positions\]"):
        attend(case, plan, torch.ones(rows + 1, 50, dtype=torch.bool))
    with pytest.raises(BadDtype, match=r"selected must be torch\.bool"):
        attend(case, plan, torch.ones(rows, 50))
