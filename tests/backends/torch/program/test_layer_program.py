"""How tiles become calls: few, of bounded size, and none that costs more than it must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.attention.sharing import CPU_COST
from prefixkit.attention.variants import (
    CAUSAL,
    sliding_window,
)
from prefixkit.attention.visible import ALL
from prefixkit.backends.torch import tuning
from prefixkit.backends.torch.program.attention_calls import batches
from prefixkit.backends.torch.program.layer_program import Program
from prefixkit.backends.torch.program.tiles import make_tiles
from prefixkit.backends.torch.tuning import Heads
from prefixkit.testing.forests import (
    SHARE_ALL,
    SHARE_NONE,
    attend,
    plan_of,
    program_of,
)
from tests.backends.torch.cases import decode_case, step_tree, tree_case
from tests.seeds import seeds


@seeds(20)
def test_batches_hold_every_tile_once_and_stay_small(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = decode_case(50, rng.integers(1, 40, 30).tolist())
    tiles = make_tiles(plan_of(case, SHARE_ALL), step_tree(case), ALL, None)
    heads = Heads(6, 2, 32, 4, tuning=replace(tuning.CPU, batch_elements=1 << 12))
    made = list(batches(tiles, heads, scored=None))
    assert sorted(np.concatenate(made).tolist()) == list(range(len(tiles)))
    for batch in made:
        assert np.all(np.diff(tiles.row[batch]) >= 0)
        assert len(batch) == 1 or len(batch) * tiles.tokens[batch].max() * heads.kv_elements <= 1 << 12


def test_equal_leaves_are_one_call_without_mask_and_long_nodes_are_not_copied() -> None:
    case = decode_case(800, [16] * 12)
    program = program_of(case, plan_of(case, SHARE_ALL))
    shared, leaves = program.calls
    assert (shared.rows, shared.length, shared.slot) == (12, 800, 0)
    assert (leaves.batch, leaves.rows, leaves.length, leaves.mask, leaves.row) == (12, 1, 16, None, 0)


def test_ragged_leaves_take_few_calls() -> None:
    rng = np.random.default_rng(0)
    case = decode_case(800, rng.integers(1, 65, 32).tolist())
    program = program_of(case, plan_of(case, SHARE_ALL))
    assert len(program.calls) <= 4


def test_a_fresh_prompt_is_one_call_bitwise_equal_to_sdpa() -> None:
    case = tree_case([-1], [300], [(0, 0, 300)])
    plan = plan_of(case, CPU_COST)
    (call,) = program_of(case, plan).calls
    assert call.causal and isinstance(call.slot, int)
    out, _ = attend(case, plan)
    k, v = (pages.flatten(0, 1)[:300].transpose(0, 1)[None] for pages in (case.k_pages, case.v_pages))
    q = case.q.transpose(0, 1)[None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(out, expected[0].transpose(0, 1))


@pytest.mark.parametrize("runs", [[(0, 0, 300)], [(1, 0, 30), (2, 29, 30)]], ids=["prefill", "mixed"])
def test_a_window_wider_than_the_text_costs_what_causal_costs(runs: list[tuple[int, int, int]]) -> None:
    case = tree_case([-1, 0, 0], [300, 30, 30], runs)
    plan = plan_of(case, SHARE_ALL)

    def work(program: Program) -> list[tuple[int, ...]]:
        return sorted((c.batch, c.rows, c.length, c.causal, c.mask is None, c.grouped) for c in program.calls)

    causal, window = program_of(case, plan), program_of(case, plan, sliding_window(4096))
    assert all(call.mask is None for call in window.calls)
    pairs = [sum(c.batch * c.rows * c.length for c in program.calls if not c.causal) for program in (causal, window)]
    if runs[0][0] == 1:
        assert work(causal) == work(window)
    else:
        # Rows are tiled for the mask's sake, so what was a triangle becomes full tiles and small triangles.
        assert pairs[1] <= 300 * 300 / 2


def test_a_narrow_window_reads_only_what_is_in_it() -> None:
    case = decode_case(2000, [20] * 8)
    plan = plan_of(case, SHARE_ALL)
    assert sum(c.batch * c.length for c in program_of(case, plan, sliding_window(64)).calls) <= 64 + 8 * 20
    assert sum(c.batch * c.length for c in program_of(case, plan, sliding_window(8)).calls) <= 8 * 8


def test_gathers_are_bounded() -> None:
    costs = replace(tuning.CPU, call_us=1e9, batch_elements=1 << 11, call_elements=1 << 12)
    case = tree_case([-1, 0, 0], [500, 400, 30], [(1, 399, 400), (2, 29, 30)], orderly=False)
    program = program_of(case, plan_of(case, SHARE_NONE), CAUSAL, costs)
    assert len(program.calls) > 10
    for call in program.calls:
        assert isinstance(call.slot, int) or call.batch * call.length * 2 * 32 <= costs.call_elements
