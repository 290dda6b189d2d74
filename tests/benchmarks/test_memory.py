"""What the tree-only parts of the memory benchmark must show at any size: they need no clock."""

from __future__ import annotations

import numpy as np

from benchmarks.memory.tree import few_shots, fill, hit_rate, zipf


def test_pages_of_16_tokens_are_fuller_than_paged_attention_has_reported():
    row = fill(16, at_once=8, prompts=8, samples=16, length=1000, every=50)
    assert row["fill"] > 0.963  # vLLM's effective memory usage (Kwon et al. 2023, figure 2)
    assert row["lost_elsewhere"] < 0.005, "only the last page of a sample is part empty"


def test_pages_of_one_token_lose_nothing():
    assert fill(1, at_once=2, prompts=2, samples=4, length=100, every=50)["fill"] == 1.0


def test_each_request_of_a_cache_that_holds_all_computes_only_what_is_new():
    prompts = few_shots(np.random.default_rng(0), 5)
    order = zipf(np.random.default_rng(0), 5, 40, 1.0, 0)
    found = hit_rate("lru", 4000, prompts, order, own=16)
    total = sum(len(prompts[i]) + 16 for i in order)
    distinct = sum(len(prompts[i]) for i in set(order.tolist())) + 40 * 16
    assert found["tokens_evicted"] == 0
    assert found["hit_rate"] >= 1 - distinct / total
