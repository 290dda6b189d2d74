"""Pools of pages: what they can be, and the one tree that each holds."""

from __future__ import annotations

import pytest
import torch

import prefixkit
from tests.functional.own_model import pool_of


def test_a_pool_has_one_tree_at_a_time() -> None:
    pool = pool_of(torch.float32, 4)
    tree, sequences = prefixkit.tree_from_tokens(pool, [[1, 2], [1, 3]])
    for make in (
        lambda: prefixkit.tree_from_tokens(pool, [[5]]),
        lambda: prefixkit.tree_from_parents(pool, [-1], [1]),
    ):
        with pytest.raises(ValueError, match="another tree has sequences, or retains KV, in this pool"):
            make()
    for sequence in sequences:
        tree.release(sequence)
    later, (sequence,) = prefixkit.tree_from_parents(pool, [-1], [3])
    del later, sequence
    prefixkit.tree_from_tokens(pool, [[5]])


@pytest.mark.parametrize("first", [[], [[1, 2, 3]]], ids=["never any", "released"])
def test_a_tree_that_had_no_pages_does_not_write_to_those_of_a_second_tree(first: list[list[int]]) -> None:
    pool = pool_of(torch.float32, 4)
    attention = prefixkit.TreeAttention(pool, 4)
    empty, sequences = prefixkit.tree_from_tokens(pool, first)
    for sequence in sequences:
        empty.release(sequence)
    tree, (held,) = prefixkit.tree_from_tokens(pool, [[4, 5]])
    late = empty.insert([7, 8])
    with pytest.raises(ValueError, match="plan: another tree has sequences, or retains KV, in this pool"):
        prefixkit.plan(attention, empty, [late])
    prefixkit.commit(prefixkit.plan(attention, tree, [held]))
    tree.release(held)
    assert prefixkit.plan(attention, empty, [late]).num_rows == 2
    again = tree.insert([4])
    with pytest.raises(ValueError, match="plan: another tree"):
        prefixkit.plan(attention, tree, [again])


def test_kv_that_a_tree_retains_is_not_overwritten_by_a_second_tree() -> None:
    pool = pool_of(torch.float32, 4)
    tree, (sequence,) = prefixkit.tree_from_tokens(pool, [[1, 2, 3, 4]])
    prefixkit.commit(prefixkit.plan(prefixkit.TreeAttention(pool, 4), tree, [sequence]))
    tree.retain(sequence)
    with pytest.raises(ValueError, match="retains KV"):
        prefixkit.tree_from_tokens(pool, [[9]])


def test_a_pool_says_what_it_cannot_be() -> None:
    pool = prefixkit.kv_pool(3, 2, 32, num_pages=5, page_size=8, dtype=torch.float16, device="cpu", v_dim=16)
    assert [pages.shape for pages in pool.pages(2)] == [(5, 8, 2, 32), (5, 8, 2, 16)]
    assert pool.bytes == 3 * 5 * 8 * 2 * (32 + 16) * 2
    good = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 32, "num_pages": 4, "device": "cpu"}
    for options, message in (
        ({"dtype": torch.float64}, "dtype must be one of torch.float32"),
        ({"page_size": 200}, "page_size must be an integer from 1 to 128"),
        ({"num_pages": 0}, "kv_pool: num_pages must be at least 1"),
        ({"num_kv_heads": 0}, "kv_pool: num_kv_heads must be at least 1, got 0"),
        ({"device": "tape"}, "device must be a CPU or a GPU, got 'tape'; pass 'cpu' or 'cuda'"),
        ({"device": "mps"}, "device must be a CPU or a GPU, got 'mps'"),
        ({"device": "cuda:99"}, r"torch finds \d+ GPUs, and device is 'cuda:99'"),
    ):
        with pytest.raises(ValueError, match=message):
            prefixkit.kv_pool(**good | options)
    with pytest.raises(TypeError, match=r"kv_pool: num_pages must be an integer, got float 4.5"):
        prefixkit.kv_pool(**good | {"num_pages": 4.5})
