"""The two parts of attention over latents: which BSR rows are in which, and over which query rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prefixkit.attention.bsr import BSR, decompose
from prefixkit.attention.latent_parts import LatentPart, Part
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.testing.forests import SHARE_ALL, SHARE_NONE, make_snapshot, random_case
from tests.seeds import seeds

DEEPSEEK = HeadShape(16, 16, 192, 4, 128)  # its heads, with a latent of 512 and rotary keys of 64
SMALL = HeadShape(4, 4, 12, 4, 8)  # with a latent of 8 and rotary keys of 4


def parts_of(whole: HeadShape, latent: int, rotary: int) -> dict[Part, LatentPart]:
    return {part: LatentPart(part, whole, latent, rotary) for part in Part}


def rows_of(bsr: BSR, index: np.ndarray) -> set[tuple[object, ...]]:
    """Each BSR row as the step's query rows, its kind and its segments."""
    bounds = zip(bsr.indptr[:-1], bsr.indptr[1:], strict=True)
    segments = [tuple(zip(bsr.node[a:b], bsr.begin[a:b], bsr.end[a:b], strict=True)) for a, b in bounds]
    queries = [tuple(index[a:b]) for a, b in zip(bsr.q_begin, bsr.q_end, strict=True)]
    return set(zip(queries, bsr.kind.tolist(), segments, strict=True))


@pytest.mark.parametrize("cost", [CPU_COST, SHARE_ALL, SHARE_NONE], ids=["cpu", "all", "none"])
@seeds(20)
def test_each_row_is_in_one_part(seed, cost):
    case = random_case(np.random.default_rng(seed))
    tree = StepTree(case.snapshot, case.queries)
    whole = decompose(tree, SMALL, cost)
    found = [part.rows_of(tree, cost) for part in parts_of(SMALL, 8, 4).values()]
    one, other = (rows_of(part.bsr, part.index) for part in found)
    assert not one & other
    assert one | other == rows_of(whole, np.arange(tree.queries.num_rows))
    for part in found:
        mine = part.tree(tree)
        assert mine.queries.num_rows == len(part.index)
        assert np.array_equal(mine.positions, tree.positions[part.index])
        assert np.array_equal(mine.length, tree.length), "what the step's other queries append is there"


def fan(shared: int, leaves: int, own: int, new: int = 1) -> StepTree:
    """Leaves below one node, of which each runs its last ``new`` tokens."""
    snapshot, _ = make_snapshot(np.random.default_rng(0), [-1] + [0] * leaves, [shared] + [own] * leaves, 16)
    leaf = np.arange(1, leaves + 1, dtype=np.int32)
    return StepTree(snapshot, Queries(leaf, leaf * 0 + own - new, leaf * 0 + own))


def sizes(tree: StepTree) -> dict[Part, int]:
    return {kind: len(part.rows_of(tree, CPU_COST).bsr.kind) for kind, part in parts_of(DEEPSEEK, 512, 64).items()}


def test_decode_steps_are_absorbed_and_long_prefixes_of_many_samples_expanded():
    assert sizes(fan(1000, 32, 40)) == {Part.EXPANDED: 0, Part.ABSORBED: 33}
    assert sizes(fan(1000, 400, 40)) == {Part.EXPANDED: 1, Part.ABSORBED: 400}


def test_a_fork_of_one_token_is_absorbed_for_its_leaf_grows_under_the_plan():
    assert sizes(fan(1000, 32, 1)) == {Part.EXPANDED: 0, Part.ABSORBED: 33}


@pytest.mark.parametrize("tokens", [2, 40, 600])
def test_prompts_are_expanded(tokens):
    snapshot, _ = make_snapshot(np.random.default_rng(0), [-1], [tokens], 16)
    only = np.zeros(1, dtype=np.int32)
    assert sizes(StepTree(snapshot, Queries(only, only, only + tokens)))[Part.ABSORBED] == 0


def test_a_chunk_of_a_long_text_takes_what_is_cheaper():
    """40 queries of 1,000 tokens cost less absorbed, 400 less expanded."""
    snapshot, _ = make_snapshot(np.random.default_rng(0), [-1], [1000], 16)
    only = np.zeros(1, dtype=np.int32)
    for queries, part in ((40, Part.ABSORBED), (400, Part.EXPANDED)):
        assert sizes(StepTree(snapshot, Queries(only, only + 1000 - queries, only + 1000)))[part] == 1


def test_the_absorbed_part_attends_with_one_kv_head_of_latent_and_rotary():
    parts = parts_of(DEEPSEEK, 512, 64)
    assert parts[Part.EXPANDED].shape == DEEPSEEK
    assert parts[Part.ABSORBED].shape == replace(DEEPSEEK, kv_heads=1, head_dim=576, v_dim=512)
