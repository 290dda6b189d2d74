"""Which nodes of a tree of latents are expanded, and kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prefixkit.attention.bsr import decompose
from prefixkit.attention.gpu.latent_cost import H200_LATENTS, choose_expanded, expands_own, made_bytes
from prefixkit.attention.latent_parts import LatentPart, Part
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.testing.forests import make_snapshot

WHOLE = LatentPart(Part.EXPANDED, HeadShape(128, 128, 192, 2, 128), 512, 64)


def decode_tree(rows: int, shared: int, *, known: bool = True) -> StepTree:
    """A prompt of ``shared`` tokens with a row of 8 tokens for each sample."""
    snapshot, _ = make_snapshot(np.random.default_rng(0), [-1, *[0] * rows], [shared, *[8] * rows], 16)
    leaf = np.arange(1, rows + 1, dtype=np.int32)
    snapshot.computed[leaf] = 7
    snapshot = replace(snapshot, content=np.arange(rows + 1) if known else None)
    return StepTree(snapshot, Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf]))


@pytest.mark.parametrize(("rows", "expands"), [(1, False), (16, False), (32, False), (64, True), (256, True)])
def test_a_prompt_of_many_samples_is_expanded_and_kept(rows: int, expands: bool) -> None:
    chosen = choose_expanded(decode_tree(rows, 4096), WHOLE, H200_LATENTS, 10**6)
    assert chosen.nodes.tolist() == [expands, *[False] * rows]
    assert chosen.keeps


@pytest.mark.parametrize(("rows", "expands"), [(64, False), (128, False), (256, True), (1024, True)])
@pytest.mark.parametrize("known", [True, False])
def test_what_cannot_be_kept_is_expanded_for_more_rows(rows: int, expands: bool, known: bool) -> None:
    """There is no room for it, or the tree does not say what its nodes hold."""
    tree = decode_tree(rows, 4096, known=known)
    chosen = choose_expanded(tree, WHOLE, H200_LATENTS, 4095 if known else 10**6)
    assert bool(chosen.nodes[0]) == expands and not chosen.keeps


def test_a_short_prompt_does_not_pay_for_another_part() -> None:
    assert not choose_expanded(decode_tree(64, 100), WHOLE, H200_LATENTS, 10**6).nodes.any()


@pytest.mark.parametrize(("queries", "expands"), [(1, False), (8, False), (256, False), (2048, True)])
def test_prompts_are_expanded_and_single_queries_absorbed(queries: int, expands: bool) -> None:
    snapshot, _ = make_snapshot(np.random.default_rng(0), [-1], [2048], 16)
    snapshot.computed[0] = 2048 - queries
    tree = StepTree(snapshot, Queries(*(np.array([n], np.int32) for n in (0, 2048 - queries, 2048))))
    own = expands_own(decompose(tree, WHOLE.whole, CPU_COST), tree, WHOLE, H200_LATENTS)
    assert own.tolist() == [expands]


def test_the_rotary_part_of_keys_counts_once() -> None:
    assert made_bytes(WHOLE) == 2 * (128 * (128 + 128) + 64)
