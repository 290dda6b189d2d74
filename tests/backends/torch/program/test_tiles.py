"""How plans become tiles: each query sees what its items show it, and little else is read."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from prefixkit.attention.bsr import OPEN
from prefixkit.attention.plan import Plan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CPU_COST
from prefixkit.attention.visible import ALL, Visible
from prefixkit.backends.torch.program.tiles import FULL, MASKED, TRIANGLE, Tiles, make_tiles, split_keys
from prefixkit.testing.forests import (
    SHARE_ALL,
    SHARE_NONE,
    attend,
    plan_of,
    random_case,
    random_split_plan,
)
from prefixkit.tree.arrays import Longs
from tests.backends.torch.cases import step_tree, tree_case
from tests.seeds import seeds


def seen_by_items(plan: Plan, tree: StepTree) -> Counter[tuple[int, int]]:
    """(query row, slot) of every key that an item shows to a query; straight from the meaning of a plan."""
    seen: Counter[tuple[int, int]] = Counter()
    for q_begin, q_end, _, first, shape, *_ in plan.items.tolist():
        for node, begin, end in plan.segments[first : first + (shape >> 2)].tolist():
            for offset in range(begin, min(end, int(tree.length[node]))):
                slot = int(tree.snapshot.slots(np.array([node]), np.array([offset]))[0])
                for row in range(q_begin, q_end):
                    if not shape & 3 or tree.snapshot.start[node] + offset <= tree.positions[row]:
                        seen[row, slot] += 1
    return seen


def seen_by_tiles(tiles: Tiles, q_positions: Longs) -> Counter[tuple[int, int]]:
    seen: Counter[tuple[int, int]] = Counter()
    for tile in range(len(tiles)):
        runs = range(tiles.indptr[tile], tiles.indptr[tile + 1])
        keys = [(int(tiles.slot[r]) + i, int(tiles.position[r]) + i) for r in runs for i in range(tiles.count[r])]
        for i in range(tiles.rows[tile]):
            row = int(tiles.row[tile]) + i
            for j, (slot, position) in enumerate(keys):
                mask = tiles.mask[tile]
                if mask == FULL or (mask == TRIANGLE and j <= i) or (mask == MASKED and position <= q_positions[row]):
                    seen[row, slot] += 1
    return seen


@seeds(60)
def test_tiles_show_each_query_what_its_items_show_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    cost = (SHARE_ALL, SHARE_NONE, CPU_COST)[seed % 3]
    plan = random_split_plan(rng, case, cost) if seed % 5 == 0 else plan_of(case, cost)
    tree = step_tree(case)
    tiles = make_tiles(plan, tree, ALL, None if seed % 2 else int(rng.integers(1, 9)))
    assert seen_by_tiles(tiles, tree.positions) == seen_by_items(plan, tree)
    longest = rng.integers(1, 30, len(tiles))
    detached = split_keys(tiles, int(rng.integers(1, 12)), longest)
    assert seen_by_tiles(detached, tree.positions) == seen_by_items(plan, tree)


def test_a_window_drops_keys_that_no_query_of_the_tile_sees() -> None:
    case = tree_case([-1, 0], [100, 60], [(1, 0, 60)])
    plan = plan_of(case, SHARE_NONE)
    for most_rows, keys in ((None, 9 + 60), (20, 3 * (9 + 20))):
        assert make_tiles(plan, step_tree(case), Visible(window=10), most_rows).tokens.sum() == keys


def test_a_causal_item_may_span_positions_with_gaps() -> None:
    """No planner makes them, but a plan may hold them: rows of two leaves, positions 3, 4, 3, 4, under one mask."""
    case = tree_case([-1, 0, 0], [3, 2, 2], [(1, 0, 2), (2, 0, 2)])
    # One item of both leaves' queries over the root and, as they stand at the same positions, the first leaf.
    plan = Plan(
        counts=np.array([1, 0, 4, 0, 0, 0, 0, 0], dtype=np.int32),
        tile_items=np.array([[0, 4, -1, 0, 4 * 2 + 1, 0, 0, 3]], dtype=np.int32),
        decode_items=np.zeros((0, 8), dtype=np.int32),
        segments=np.array([[0, 0, 3], [1, 0, OPEN]], dtype=np.int32),
        merge_indptr=np.zeros(5, dtype=np.int32),
        merge_indices=np.zeros(0, dtype=np.int32),
    )
    tree = step_tree(case)
    tiles = make_tiles(plan, tree, ALL, None)
    assert seen_by_tiles(tiles, tree.positions) == seen_by_items(plan, tree)
    assert MASKED in tiles.mask
    out, _ = attend(case, plan)
    k, v = (pages.flatten(0, 1).repeat_interleave(3, dim=1) for pages in (case.k_pages, case.v_pages))
    slots = [*range(3), *range(16, 18)]
    for row, length in enumerate((4, 5, 4, 5)):
        score = case.scale * torch.einsum("hd,lhd->hl", case.q[row], k[slots[:length]])
        expected = torch.einsum("hl,lhd->hd", score.softmax(-1), v[slots[:length]])
        torch.testing.assert_close(out[row], expected)
