"""Trees from tokens, from parents and lengths, and from the arrays of a cascade: one tree, however it is told."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit.testing.forests import random_parents
from prefixkit.tree import OutOfPages
from tests.functional.own_model import DIM, HEADS, KV_HEADS, Errors, OwnModel, pool_of
from tests.seeds import seeds


def test_sharing_of_token_lists_is_found_token_by_token() -> None:
    pool = pool_of(torch.float32, 4)
    tree, (first, second, third) = prefixkit.tree_from_tokens(pool, [[1, 2, 3, 4, 5], np.array([1, 2, 3, 9]), (1, 2)])
    assert tree.snapshot().num_tokens == 6 and tree.snapshot().num_tokens_unshared == 11
    assert first.slots()[:2].tolist() == second.slots()[:2].tolist() == third.slots().tolist()


@seeds(10)
def test_a_tree_of_parents_has_these_nodes_and_each_node_its_sequence(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    # Any order in which parents come first, not depth-first alone.
    nodes = int(rng.integers(1, 30))
    parents = [int(rng.integers(-1, node)) for node in range(nodes)] if seed % 2 else random_parents(rng, nodes)
    lengths = rng.integers(1, 20, nodes).tolist()
    tree, sequences = prefixkit.tree_from_parents(pool_of(torch.float32, int(rng.choice([1, 4, 16]))), parents, lengths)
    snapshot = tree.snapshot()
    assert snapshot.num_nodes == nodes
    index = [sequence.node.index for sequence in sequences]
    assert snapshot.length[index].tolist() == lengths
    assert [-1 if above < 0 else index[above] for above in parents] == snapshot.parent[index].tolist()
    slots = np.concatenate([sequence.node.slots for sequence in sequences])
    assert len(np.unique(slots)) == len(slots) == sum(lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_node_of_random_trees_attends_to_all_above_it(dtype: torch.dtype) -> None:
    """Chains, stars, lone roots and forests, in parts: some nodes first, then all."""
    errors = Errors()
    for seed in range(12):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        parents = random_parents(rng, int(rng.integers(1, 16)))
        pool = pool_of(dtype, int(rng.choice([1, 3, 16])))
        tree, nodes = prefixkit.tree_from_parents(pool, parents, rng.integers(1, 12, len(parents)).tolist())
        model = OwnModel(prefixkit.TreeAttention(pool, HEADS), rng)
        some = [nodes[at] for at in rng.permutation(len(nodes))[: int(rng.integers(1, len(nodes) + 1))]]
        for sequences in (some, nodes):
            step = prefixkit.plan(model.attention, tree, sequences)
            for sequence, *found in zip(sequences, *model.run(step, sequences), strict=True):
                errors.add(model, sequence.tokens(), *found)
            prefixkit.commit(step)
    errors.check()


def test_a_tree_of_parents_grows_as_one_of_tokens() -> None:
    pool = pool_of(torch.float32, 4)
    tree, (root, left, right) = prefixkit.tree_from_parents(pool, [-1, 0, 0], [6, 2, 3])
    attention = prefixkit.TreeAttention(pool, HEADS)
    step = prefixkit.plan(attention, tree, [left, right])
    assert step.positions.tolist() == [*range(6), 6, 7, 6, 7, 8]
    prefixkit.commit(step)
    for _ in range(5):
        tree.extend_each([right, left], [0, 0])
        step = prefixkit.plan(attention, tree, [right, left])
        assert step.positions[step.last_rows].tolist() == [right.length - 1, left.length - 1]
        prefixkit.commit(step)
    assert attention.planner.plans_made == 2


@pytest.mark.parametrize(
    ("parents", "lengths", "message"),
    [
        ([-1, 0], [3], "one length for each node, got 2 parents and 1 lengths"),
        ([-1, 2, 0], [1, 1, 1], "node 1 has parent 2, which does not come before it; list parents before"),
        ([-1, 1], [1, 1], "node 1 has parent 1, which does not come before it"),
        ([-1, 7], [1, 1], "node 1 has parent 7, which does not exist"),
        ([-2], [1], "node 0 has parent -2, which does not exist"),
        ([-1, 0], [3, 0], "node 1 must have at least 1 token, got 0"),
    ],
)
def test_parents_and_lengths_that_are_no_tree_are_refused_by_name(
    parents: list[int], lengths: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"tree_from_parents: {message}"):
        prefixkit.tree_from_parents(pool_of(torch.float32, 4), parents, lengths)


@pytest.mark.parametrize(
    ("parents", "lengths", "message"),
    [
        ([-1, 0], [3, 2.5], r"lengths must be a list of integers, got \[3, 2.5\]"),
        ([-1.0, 0.0], [3, 2], "parents must be a list of integers"),
        ([-1, 0], 3, "lengths must be a list of integers, got 3"),
    ],
)
def test_parents_and_lengths_of_another_type_are_named(parents: Any, lengths: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"tree_from_parents: {message}"):
        prefixkit.tree_from_parents(pool_of(torch.float32, 4), parents, lengths)


def test_a_tree_that_does_not_fit_its_pool_says_so() -> None:
    pool = pool_of(torch.float32, 4, num_pages=3)
    for make in (
        lambda: prefixkit.tree_from_tokens(pool, [range(13)]),
        lambda: prefixkit.tree_from_parents(pool, [-1, 0], [12, 1]),
    ):
        with pytest.raises(OutOfPages, match=r"only . of 3 are free"):
            make()


def test_caches_of_ones_own_are_read_and_written_where_they_are() -> None:
    caches = [tuple(torch.full((64, 4, KV_HEADS, DIM), torch.nan) for _ in "kv") for _ in range(2)]
    found = []
    for pool in (prefixkit.kv_pool_from_tensors(caches), pool_of(torch.float32, 4, num_pages=64)):
        tree, requests = prefixkit.tree_from_tokens(pool, [range(9), [0, 1, 2, 9]])
        model = OwnModel(prefixkit.TreeAttention(pool, HEADS), np.random.default_rng(1))
        found.append(model.run(prefixkit.plan(model.attention, tree, requests), requests))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(caches[0][0].nan_to_num(), pool.pages(0)[0].nan_to_num()) and caches[1][0].isnan().all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_of_k_and_v_in_one_tensor_is_taken_apart(layout: str) -> None:
    cache = torch.randn(5, 2, 4, 3, 16) if layout == "NHD" else torch.randn(5, 2, 3, 4, 16)
    pool = prefixkit.kv_pool_from_tensors([cache, cache], layout)
    assert (pool.num_pages, pool.page_size, len(pool.layers)) == (5, 4, 2)
    for of, pages in enumerate(pool.pages(1)):
        assert pages.shape == (5, 4, 3, 16)
        assert torch.equal(pages if layout == "NHD" else pages.transpose(1, 2), cache[:, of])
        assert pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def test_caches_that_are_no_pool_are_refused_by_name() -> None:
    k, other = torch.zeros(5, 4, 3, 16), torch.zeros(5, 4, 2, 16)
    for caches, layout, message in (
        ([], "NHD", "all layers must have one shape, dtype and device, got 0"),
        ([(k, k), (other, other)], "NHD", "all layers must have one shape, dtype and device, got 2"),
        ([(k, other)], "NHD", "K and V must be alike except for head_dim"),
        ([(k, k.half())], "NHD", "K and V must be alike except for head_dim"),
        ([(k[0], k[0])], "NHD", "K and V must be alike except for head_dim"),
        ([k], "NHD", r"layer 0 must have shape \[pages, 2, page_size, kv_heads, head_dim\]"),
        ([(k, k)], "DHN", 'kv_layout must be "NHD" or "HND"'),
        ([(k.double(), k.double())], "NHD", "dtype must be one of"),
        ([(torch.zeros(1, 200, 2, 16),) * 2], "NHD", "page_size must be an integer from 1 to 128"),
    ):
        with pytest.raises(ValueError, match=message):
            prefixkit.kv_pool_from_tensors(caches, layout)
    with pytest.raises(IndexError, match="layer 1 of pages for layers 0"):
        prefixkit.kv_pool_from_tensors([(k, k)]).pages(1)


# -- cascades ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cascade:
    """The arguments of a cascade, and what they stand for.

    Tokens are numbers: those of a table follow those of the table before.

    Attributes:
        arrays: The four arguments, for each level an array.
        texts: Of each request the tokens of its tables, from the root down.
        queries: How many of them, at the end, are queries.
        slots: Where the pages have each token.
    """

    arrays: list[list[np.ndarray]]
    texts: list[list[int]]
    queries: list[int]
    slots: list[int]


def random_cascade(rng: np.random.Generator, page_size: int) -> Cascade:
    """Up to four levels over up to six requests, pages strewn; inner tables may be empty."""
    levels, requests = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    queries = rng.integers(1, rng.choice([2, 4]), requests)
    bounds = [np.append(0, np.cumsum(queries))]
    for _ in range(levels - 1):
        bounds.insert(0, bounds[0][[0, *(i for i in range(1, len(bounds[0]) - 1) if rng.random() < 0.5), -1]])
    free, texts, slots = rng.permutation(400).tolist(), [list[int]() for _ in range(requests)], list[int]()
    arrays: list[list[np.ndarray]] = [bounds, [], [], []]
    for level, rows in enumerate(bounds):
        tables = list[list[int]]()
        last_len = list[int]()
        for begin, end in pairwise(rows.tolist()):
            shortest = end - begin if level == levels - 1 else 0
            length = int(rng.integers(shortest, shortest + 3 * page_size))
            tables.append([free.pop() for _ in range(-(-length // page_size))])
            last_len.append((length - 1) % page_size + 1 if length else 0)
            for text, first in zip(texts, bounds[-1].tolist(), strict=False):
                if begin <= first < end:
                    text += range(len(slots), len(slots) + length)
            slots += [tables[-1][at // page_size] * page_size + at % page_size for at in range(length)]
        arrays[1].append(np.cumsum([0, *map(len, tables)]))
        arrays[2].append(np.array(list(chain(*tables)), int))
        arrays[3].append(np.array(last_len))
    return Cascade(arrays, texts, queries.tolist(), slots)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_cascade_attends_as_the_tree_of_its_tokens_and_as_dense_attention(page_size: int, dtype: torch.dtype) -> None:
    errors = Errors()
    for seed in range(12):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        made = random_cascade(rng, page_size)
        arrays = [[torch.from_numpy(array).int() if seed % 2 else array for array in of] for of in made.arrays]
        cascade = prefixkit.tree_from_cascade(*arrays, page_size)
        pool, of_tables = pool_of(dtype, page_size), pool_of(dtype, page_size)
        tree, requests = prefixkit.tree_from_tokens(pool, made.texts)
        model = OwnModel(prefixkit.TreeAttention(pool, HEADS), rng)
        step = prefixkit.plan(model.attention, tree, requests)
        model.run(step, requests)
        prefixkit.commit(step)

        step = prefixkit.plan(model.attention, tree, requests, made.queries)
        tables = prefixkit.plan(prefixkit.TreeAttention(of_tables, HEADS), cascade)
        counted = list(zip(step.last_rows.tolist(), made.queries, strict=True))
        rows = [row for last, count in counted for row in range(last + 1 - count, last + 1)]
        assert tables.positions.tolist() == step.positions[rows].tolist()
        assert tables.last_rows.tolist() == (np.cumsum(made.queries) - 1).tolist()

        # K and V that were there before the step are in their slots; those of the step's tokens are appended.
        asked = [token for text, count in zip(made.texts, made.queries, strict=True) for token in text[-count:]]
        assert tables.slots.tolist() == [made.slots[token] for token in asked]
        where = {
            token: slot for one in requests for token, slot in zip(one.tokens().tolist(), one.slots(), strict=True)
        }
        there = [token for token in where if token not in asked]
        for mine, others in zip(of_tables.pages(0), pool.pages(0), strict=True):
            slots = [made.slots[token] for token in there]
            mine.view(-1, KV_HEADS, DIM)[slots] = others.view(-1, KV_HEADS, DIM)[[where[token] for token in there]]
        taken = [where[token] for token in asked]
        prefixkit.append(tables, 0, *(pages.view(-1, KV_HEADS, DIM)[taken] for pages in pool.pages(0)))

        q = model.random(len(rows), HEADS)
        scattered = torch.zeros(step.num_rows, HEADS, DIM, dtype=dtype)
        scattered[rows] = q
        found, expected = prefixkit.attend(tables, 0, q), prefixkit.attend(step, 0, scattered)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs[rows])
        for text, *last in zip(made.texts, *(of[tables.last_rows] for of in (q, *found)), strict=True):
            errors.add(model, np.array(text, np.int32), *last)
    errors.check()


def test_the_nodes_of_a_cascade_are_its_tables() -> None:
    """FlashInfer's documentation: one shared prefix, and below it a table for each request."""
    cascade = prefixkit.tree_from_cascade(
        [np.array([0, 3]), np.array([0, 1, 2, 3])],
        [np.array([0, 2]), np.array([0, 1, 3, 4])],
        [np.array([7, 5]), np.array([1, 9, 4, 2])],
        [np.array([16]), np.array([1, 7, 16])],
        16,
    )
    assert cascade.parent.tolist() == [-1, 0, 0, 0] and cascade.subtree_end.tolist() == [4, 2, 3, 4]
    assert cascade.length.tolist() == [32, 1, 23, 16] and cascade.computed.tolist() == [32, 0, 22, 15]
    assert cascade.start.tolist() == [0, 32, 32, 32]
    assert cascade.pages.tolist() == [7, 5, 1, 9, 4, 2] and cascade.page_indptr.tolist() == [0, 2, 3, 5, 6]


def test_requests_keep_their_numbers_where_others_have_no_queries() -> None:
    arrays = {
        "qo_indptr_arr": [[0, 1, 1, 3]],
        "paged_kv_indptr_arr": [[0, 1, 2, 3]],
        "paged_kv_indices_arr": [[0, 1, 2]],
    }
    cascade = prefixkit.tree_from_cascade(**arrays, paged_kv_last_page_len=[[4, 4, 3]], page_size=4)
    assert cascade.length.tolist() == [4, 3] and cascade.pages.tolist() == [0, 2]
    assert cascade.sequence_id.tolist() == [0, 2] and cascade.sequence_node.tolist() == [0, 1]
    variant = prefixkit.variant(lambda score, b, h, q_idx, kv_idx: score * (b + 1))
    attention = prefixkit.TreeAttention(pool_of(torch.float32, 4, num_pages=3), HEADS, variant)
    assert prefixkit.plan(attention, cascade).step.plans[0].tree.sequences.tolist() == [0, 2, 2]


def good() -> dict[str, Any]:
    return {
        "qo_indptr_arr": [[0, 2], [0, 1, 2]],
        "paged_kv_indptr_arr": [[0, 1], [0, 1, 2]],
        "paged_kv_indices_arr": [[0], [1, 2]],
        "paged_kv_last_page_len": [[4], [1, 3]],
        "page_size": 4,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qo_indptr_arr": [[0, 2]]}, "one array for each level, of which there is at least one; got 1, 2, 2, 2"),
        ({key: [] for key in list(good())[:4]}, "got 0, 0, 0, 0"),
        ({"qo_indptr_arr": [[0, 3], [0, 1, 2]]}, "level 1: it has 2 query rows, but the level above has 3"),
        ({"qo_indptr_arr": [[1, 2], [0, 1, 2]]}, "level 0: qo_indptr must begin with 0 and never fall"),
        ({"qo_indptr_arr": [[0, 2], [0, 2, 1]]}, "level 1: qo_indptr must begin with 0 and never fall"),
        ({"qo_indptr_arr": [[0, 2], [0, 2]]}, "level 1: qo_indptr is of 1 tables, but paged_kv_indptr of 2 and"),
        ({"qo_indptr_arr": [[0, 2], [0, 0, 0]]}, "level 1: it has 0 query rows, but the level above has 2"),
        ({"qo_indptr_arr": [[0, 0], [0, 0, 0]]}, "there must be at least one query row"),
        ({"qo_indptr_arr": [[0, 4], [0, 2, 4]]}, "request 0 has 2 query rows, but its last level has 1 tokens"),
        ({"paged_kv_indptr_arr": [[0, 1], [0, 1, 3]]}, "level 1: paged_kv_indptr ends at 3, but there are 2 page"),
        ({"paged_kv_indices_arr": [[0], [1, -2]]}, "level 1: page numbers must be at least 0 and below"),
        ({"paged_kv_indices_arr": [[0], [1, 2**32 + 2]]}, "level 1: page numbers must be at least 0 and below"),
        ({"paged_kv_indices_arr": [[0.0], [1, 2]]}, "level 0: paged_kv_indices must be a row of integers, got float64"),
        ({"paged_kv_last_page_len": [[4], [1, 5]]}, r"level 1: last_page_len must be 1 to page_size, 4, got \[1, 5\]"),
        ({"paged_kv_last_page_len": [[0], [1, 3]]}, r"level 0: last_page_len must be 1 to page_size, 4, got \[0\]"),
    ],
)
def test_arrays_that_are_no_cascade_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    prefixkit.tree_from_cascade(**good())
    with pytest.raises(ValueError, match=f"tree_from_cascade: .*{message}"):
        prefixkit.tree_from_cascade(**good() | changes)


def test_tables_that_cross_those_of_the_level_above_are_no_tree() -> None:
    crossing = {"qo_indptr_arr": [[0, 1, 3], [0, 2, 3]], "paged_kv_indptr_arr": [[0, 1, 2], [0, 1, 2]]}
    crossing |= {"paged_kv_indices_arr": [[0, 3], [1, 2]], "paged_kv_last_page_len": [[4, 4], [2, 3]]}
    with pytest.raises(ValueError, match="level 1: a table of the level above ends at query row 1, inside a table of"):
        prefixkit.tree_from_cascade(**crossing, page_size=4)


def test_a_step_of_page_tables_takes_no_sequences_and_is_not_committed() -> None:
    cascade, pool = prefixkit.tree_from_cascade(**good()), pool_of(torch.float32, 4, num_pages=3)
    attention = prefixkit.TreeAttention(pool, HEADS)
    step = prefixkit.plan(attention, cascade)
    with pytest.raises(ValueError, match="commit: a step of page tables or static buffers keeps no record"):
        prefixkit.commit(step)
    with pytest.raises(ValueError, match="page tables say which tokens are queries"):
        prefixkit.plan(attention, cascade, [])
    small = prefixkit.TreeAttention(pool_of(torch.float32, 4, num_pages=2), HEADS)
    with pytest.raises(ValueError, match="the tree has 3 pages of 4 tokens, but the pool has 2 of 4"):
        prefixkit.plan(small, cascade)
