"""Biases and masks that depend on distances alone, which torch's kernel reads from a view of one row for each head."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import Queries
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.variants import Variant, alibi, compose, sliding_window, variant
from prefixkit.backends.torch import tuning
from prefixkit.testing.forests import SHARE_ALL, Case, fill, make_snapshot, plan_of, program_of, run_on

HEADS = 6, 2, 32
# Every tile is a call, of more rows than one.
COSTS = replace(tuning.CPU, call_us=1e-6, distance_rows=7, group_rows=2)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    return np.random.default_rng(seed)


def by_distance(rng: np.random.Generator) -> dict[str, Variant]:
    """One of each kind; of the table's, first queries see nothing, for it hides a query's own token and the next."""
    slopes, table = rng.random(HEADS[0]), torch.from_numpy(rng.standard_normal((HEADS[0], 999), dtype=np.float32))
    table[:, :2] = -torch.inf
    by_table = variant(lambda s, b, h, q, kv: s + table[h, q - kv])
    both_ways = variant(lambda s, b, h, q, kv: s - (q - kv).abs() * 0.3)
    by_head = variant(mask_mod=lambda b, h, q, kv: (kv <= q) & ((q - kv + h) % 3 > 0))
    return {
        "alibi": alibi(slopes),
        "table": by_table,
        "window": compose(alibi(slopes), sliding_window(9)),
        "by head": compose(by_table, by_head),
        "ahead": compose(both_ways, sliding_window(9, causal=False)),
    }


def prompts(rng: np.random.Generator, parents: list[int], lengths: list[int]) -> Case:
    """All tokens of all nodes are queries, as where a prompt and what follows it are computed."""
    snapshot, num_pages = make_snapshot(rng, parents, lengths, 16)
    node = np.arange(len(parents), dtype=np.int32)
    return fill(rng, snapshot, num_pages, Queries(node, 0 * node, snapshot.length, node), HEADS, torch.float32)


@pytest.mark.parametrize("name", ["alibi", "table", "window", "by head", "ahead"])
@pytest.mark.parametrize("held", [True, False])
def test_they_are_those_of_each_query_and_key(name: str, held: bool, rng: np.random.Generator) -> None:
    """Held from layer to layer, and made in each run where they take too much memory."""
    of, case = by_distance(rng)[name], prompts(rng, [-1, 0, 1, 0], [37, 20, 6, 11])
    assert of.by_distance
    program = program_of(case, plan_of(case, SHARE_ALL), of, COSTS if held else replace(COSTS, call_elements=1 << 9))
    assert any(call.descending and call.biased != held for call in program.calls)
    out, lse = run_on(case, program, of)
    where = case.snapshot, case.row_node, case.positions.numpy()
    exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, of)
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), exact.out, rtol=1e-4, atol=1e-5)


def test_a_long_prompt_holds_one_row_of_biases_for_each_tile_and_head(rng: np.random.Generator) -> None:
    case = prompts(rng, [-1], [700])
    program = program_of(case, plan_of(case, SHARE_ALL), alibi(rng.random(HEADS[0])))
    for call in program.calls:
        assert call.descending and call.mask is not None
        assert call.mask.untyped_storage().nbytes() == 4 * HEADS[0] * (call.rows + call.length - 1)
